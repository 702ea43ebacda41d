"""Entry point of the command. Imports nothing heavy: each verb loads what it needs when it runs."""

from __future__ import annotations


def main() -> None:
    """Run the command line."""
