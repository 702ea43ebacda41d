"""Entry point of the command line: the commands, and the one place that maps errors to exit codes.

Imports nothing heavy: each command imports what it needs when it runs, so that help and errors in a
request are fast.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from surefoot.cli import (
    audit,
    check,
    checkpoint,
    checkpoint_exchange,
    compare,
    doctor,
    failure,
    report,
    runs,
    show,
    train,
)
from surefoot.cli.session import Session
from surefoot.core.errors import EXIT_DONE


class _Verbs(TyperGroup):
    """Remembers a Ctrl-C, which typer turns into a bare exit code."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            ctx.obj.interrupted = True
            raise


app = typer.Typer(
    name="surefoot",
    cls=_Verbs,
    add_completion=False,
    pretty_exceptions_enable=False,
    invoke_without_command=True,
    help="Trains PyTorch models and proves that the training is right.",
    epilog="Start with: surefoot train",
)
app.command("train")(train.train)
app.command("check")(check.check)
app.command("audit", context_settings=audit.CONTEXT)(audit.audit)
app.add_typer(show.app, name="show")
app.command("doctor")(doctor.doctor)
app.command("report")(report.write_page)
app.command("compare")(compare.compare)
app.command("runs")(runs.list_runs)
checkpoint.app.command("export")(checkpoint_exchange.export)
checkpoint.app.command("import")(checkpoint_exchange.import_)
app.add_typer(checkpoint.app, name="checkpoint")


def _print_version(value: bool) -> None:
    if value:
        from importlib.metadata import version

        typer.echo(f"surefoot {version('surefoot')}")
        raise typer.Exit


@app.callback()
def _root(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version.", callback=_print_version, is_eager=True
        ),
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def invoke(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code; `arguments` default to the command line."""
    session = Session()
    try:
        code = typer.main.get_command(app).main(
            args=None if arguments is None else list(arguments),
            prog_name="surefoot",
            standalone_mode=False,
            obj=session,
        )
    except BaseException as error:
        return failure.present(error, session)
    if session.interrupted:
        return failure.present(KeyboardInterrupt(), session)
    return code if isinstance(code, int) else EXIT_DONE


def main() -> NoReturn:
    """Runs the command line and exits."""
    # A console script starts with its own folder on the path, not the working directory:
    # `package.module:Name` would not be found. Appended, so that nothing is shadowed.
    here = os.getcwd()
    if here not in sys.path and "" not in sys.path:
        sys.path.append(here)
    raise SystemExit(invoke())
