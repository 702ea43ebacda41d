"""The scripts here are run by tests in a process of their own; nobody imports them."""

collect_ignore_glob = ["loops_*.py"]
