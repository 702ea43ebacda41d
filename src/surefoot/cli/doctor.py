"""`surefoot doctor`: finds causes in the log of a run. Reads logs and changes nothing."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from surefoot.cli.session import DebugOption, JsonOption, Session
from surefoot.core.errors import EXIT_DONE, EXIT_FOUND, RequestError
from surefoot.core.finding import Certainty, Severity

if TYPE_CHECKING:
    from surefoot.core.finding import Finding
    from surefoot.diagnosis.doctor import Diagnosis

STYLES = {"error": "bold red", "warning": "bold yellow", "hint": "bold cyan"}
MAX_NAMED = 6
MAX_COLUMNS = 30


def doctor(
    context: typer.Context,
    log: Annotated[
        Path,
        typer.Argument(
            metavar="RUN|LOG",
            help="A run folder or a log: TensorBoard events, CSV, JSON, JSON lines, printed text.",
        ),
    ],
    json_file: JsonOption = None,
    debug: DebugOption = False,
) -> int:
    """Find what went wrong in a run from its log: cause, evidence, fix.

    The most likely cause comes first. Exit code 1 if an error was found that is more than a
    heuristic, 2 if no loss was read and nothing was found.
    """
    from surefoot.diagnosis.doctor import examine
    from surefoot.diagnosis.readers import read_recording

    session: Session = context.obj
    diagnosis = examine(read_recording(log))
    if not diagnosis.has_loss and not diagnosis.findings:
        raise RequestError(
            "no loss was read, so nothing can be said of this training",
            where=diagnosis.source,
            rule=f"columns: {', '.join((*diagnosis.recorded, *diagnosis.ignored)[:MAX_COLUMNS])}",
            remedy="rename the column of the loss to `loss`; the page on the doctor lists the names"
            " that are known",
        )
    session.answer(_facts(diagnosis))
    _show(session, diagnosis)
    is_error = any(
        finding.severity is Severity.ERROR and finding.certainty is not Certainty.HEURISTIC
        for finding in diagnosis.findings
    )
    return EXIT_FOUND if is_error else EXIT_DONE


def _facts(diagnosis: Diagnosis) -> dict[str, object]:
    return {
        "source": diagnosis.source,
        "format": diagnosis.kind,
        "rows": diagnosis.num_rows,
        "last_step": diagnosis.last_step,
        "healthy": diagnosis.is_healthy and diagnosis.has_loss,
        "objective": diagnosis.objective.name.lower(),
        "findings": [finding.as_json() for finding in diagnosis.findings],
        "consequences": [finding.as_json() for finding in diagnosis.consequences],
        "recorded": diagnosis.recorded,
        "not_recorded": {entry.missing: entry.slugs for entry in diagnosis.undetermined},
        "ignored_columns": diagnosis.ignored,
        "left_out": diagnosis.left_out,
    }


def _show(session: Session, diagnosis: Diagnosis) -> None:
    session.say(
        f"{diagnosis.kind} {diagnosis.source}: {diagnosis.num_rows:,} rows,"
        f" {diagnosis.last_step:,} updates"
    )
    for rank, finding in enumerate(diagnosis.findings, start=1):
        _show_finding(session, rank, finding)
    if diagnosis.is_too_short:
        session.say(f"\nonly {diagnosis.num_rows} rows: too few to judge the curves")
    elif not diagnosis.judges_loss:
        session.say(f"\nit optimizes {diagnosis.objective.value}: no cause was judged by it")
    elif diagnosis.is_healthy and diagnosis.has_loss:
        session.say("\nnothing wrong was found in what was recorded", style="bold green")
    for finding in diagnosis.consequences:
        session.say(f"\nalso seen, and explained by the above: {finding.slug} ({finding.code})")
        session.say(f"  {finding.message}", style="dim")
    if diagnosis.undetermined:
        session.say("\nnot recorded, so not checked:", style="bold")
        width = max(len(entry.missing) for entry in diagnosis.undetermined)
        for entry in diagnosis.undetermined:
            named = ", ".join(entry.slugs[:MAX_NAMED])
            more = len(entry.slugs) - MAX_NAMED
            rest = f" and {more} more" if more > 0 else ""
            session.say(f"  {entry.missing.ljust(width)}   {named}{rest}", style="dim")
    for left_out in diagnosis.left_out:
        session.say(f"\n{left_out}", style="yellow")
    if diagnosis.findings:
        code = diagnosis.findings[0].code
        session.next((f"surefoot show causes {code}", "explanation"))
    else:
        session.next((f"surefoot doctor {diagnosis.source} --json -", "all details"))


def _show_finding(session: Session, rank: int, finding: Finding) -> None:
    severity = finding.severity.value
    head = Text(f"\n{rank}. {severity}", style=STYLES[severity])
    head.append(f" {finding.code} {finding.slug}", style="bold")
    head.append(f" ({finding.certainty.value})")
    session.console.print(head, soft_wrap=True)
    session.say(f"  {finding.message}")
    session.say(f"  fix: {finding.fix}", style="green")
