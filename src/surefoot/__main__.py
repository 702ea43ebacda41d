"""Makes `python -m surefoot` the same command as `surefoot`. Holds nothing of its own."""

from __future__ import annotations

from surefoot.cli.main import main

if __name__ == "__main__":
    main()
