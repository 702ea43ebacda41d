"""`surefoot report`: writes the page of a run from its run folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from surefoot.cli.session import DebugOption, JsonOption, Session
from surefoot.observe.formatting import format_bytes


def write_page(
    context: typer.Context,
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder, whatever its status.")],
    baseline: Annotated[
        Path | None,
        typer.Option(
            metavar="RUN",
            help="Show differences from the configuration of this run "
            "(default: the baseline of the contract).",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Where to write it (default: report.html in the run)."),
    ] = None,
    json_file: JsonOption = None,
    debug: DebugOption = False,
) -> None:
    """Write one self-contained HTML page: verdict, curves, slices, time, memory, record."""
    from surefoot.observe.readers.run_data import read_run
    from surefoot.report.run_page import write_page

    session: Session = context.obj
    path = write_page(read_run(run), baseline=baseline, out=out)
    size = path.stat().st_size
    session.answer({"report": path, "bytes": size})
    session.say(f"{path}  ({format_bytes(size)}, self-contained)")
    session.next(
        (f"surefoot doctor {run}", "find what went wrong"),
        (f"surefoot compare {run} OTHER", "compare with another run"),
    )
