"""Shared by all commands: the destination and form of output, and two common options.

Text for people goes to the console; the same facts go as JSON to a file or to standard output.
Knows nothing of the individual commands.
"""

from __future__ import annotations

import dataclasses
import io
import json
import math
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from surefoot.core.finding import Finding

STANDARD_OUTPUT = "-"
WIDTH_WITHOUT_TERMINAL = 140


@dataclass
class Session:
    """One invocation of the command."""

    json_target: str | None = None
    """File of the JSON answer, `-` for standard output, None if not requested."""
    debug: bool = False
    interrupted: bool = False
    """Whether Ctrl-C ended the command."""
    is_rank: bool = False
    """Whether this process is one of several ranks."""
    quiet: bool = False
    """Whether another process prints the output: rank 0, for all ranks."""

    @cached_property
    def console(self) -> Console:
        """Output for people; standard error if JSON uses standard output."""
        if self.quiet:
            return Console(file=io.StringIO())
        return _console(stderr=self.json_target == STANDARD_OUTPUT)

    @cached_property
    def errors(self) -> Console:
        return _console(stderr=True)

    def answer(self, facts: Mapping[str, object]) -> None:
        """Writes the facts of this command as JSON, if requested."""
        if self.json_target is None or self.quiet:
            return
        text = json.dumps(plain(facts), indent=2, ensure_ascii=False, allow_nan=False) + "\n"
        if self.json_target == STANDARD_OUTPUT:
            sys.stdout.write(text)
            sys.stdout.flush()
        else:
            Path(self.json_target).write_text(text, encoding="utf-8")

    def say(self, text: str, style: str = "") -> None:
        """Prints text verbatim: brackets are not markup, and long lines are not wrapped."""
        self.console.print(Text(text, style=style), soft_wrap=True)

    def advise(self, findings: Sequence[Finding]) -> None:
        """Prints advice, which is never an error and changes nothing."""
        for finding in findings:
            self.say(f"note: {finding.message} [{finding.code}]", style="dim")
            if finding.fix:
                self.say(f"      {finding.fix}", style="dim")

    def next(self, *commands: tuple[str, str]) -> None:
        """Prints suggestions: pairs of a command and its purpose."""
        width = max(len(command) for command, _ in commands)
        self.say("\nnext:", style="bold")
        for command, purpose in commands:
            self.say(f"  {command.ljust(width)}   {purpose}")


def _console(*, stderr: bool) -> Console:
    console = Console(stderr=stderr, highlight=False)
    if not console.is_terminal:
        # Rich would assume 80 columns and wrap tables that a program may parse.
        console = Console(stderr=stderr, highlight=False, width=WIDTH_WITHOUT_TERMINAL)
    return console


def plain(value: object) -> Any:
    """The value in JSON's own types.

    NaN and infinities, which JSON lacks, become the strings `NaN`, `Infinity`, `-Infinity`.

    >>> plain({"loss": float("nan"), "folder": Path("runs")})
    {'loss': 'NaN', 'folder': 'runs'}
    """
    if isinstance(value, Enum):
        return plain(value.value)
    if isinstance(value, bool | int | str) or value is None:
        return value
    if isinstance(value, float):
        if math.isnan(value):
            return "NaN"
        return value if math.isfinite(value) else ("Infinity" if value > 0 else "-Infinity")
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item) for item in value]
    return str(value)


def table(*columns: str, title: str | None = None) -> Table:
    """An empty table in the style of this command."""
    made = Table(title=title, title_justify="left", box=None, pad_edge=False, header_style="bold")
    for column in columns:
        made.add_column(column, overflow="fold")
    return made


def cells(*values: object) -> list[Text]:
    """Values as table cells in which brackets are not markup."""
    return [Text(str(value)) for value in values]


def _remember_json(ctx: typer.Context, value: str | None) -> str | None:
    if value is not None and value != STANDARD_OUTPUT:
        folder = Path(value).parent
        if not folder.is_dir():
            raise typer.BadParameter(f"the folder {folder} does not exist")
        # Absolute, since user code may change the working directory.
        value = os.path.abspath(value)
    ctx.obj.json_target = value
    return value


def _remember_debug(ctx: typer.Context, value: bool) -> bool:
    ctx.obj.debug = value
    return value


JsonOption = Annotated[
    str | None,
    typer.Option(
        "--json",
        metavar="FILE",
        help="Write the answer as JSON to FILE (- for standard output).",
        callback=_remember_json,
        expose_value=True,
    ),
]
DebugOption = Annotated[
    bool,
    typer.Option("--debug", help="On an error, show the traceback.", callback=_remember_debug),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Override one value of the recipe, such as optimizer.lr=3e-4. Repeatable.",
    ),
]
