"""`surefoot show`: look before you leap. Each word prints one table and changes nothing."""

from __future__ import annotations

import typer

app = typer.Typer(help="Look before you leap.", no_args_is_help=True)
