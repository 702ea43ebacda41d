"""`surefoot audit`: runs any PyTorch script under the sanitizer and prints what it found."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from surefoot.cli.session import (
    STANDARD_OUTPUT,
    DebugOption,
    JsonOption,
    Session,
)
from surefoot.core.errors import EXIT_DONE, EXIT_FOUND, RequestError

if TYPE_CHECKING:
    from surefoot.core.finding import Finding
    from surefoot.sanitizer.supervise import Result

STYLES = {"error": "bold red", "warning": "bold yellow", "hint": "bold cyan"}
LEVELS = ("light", "deep")
MAX_ERRORS = 5
CONTEXT = {"allow_interspersed_args": False, "ignore_unknown_options": False}


def audit(
    context: typer.Context,
    command: Annotated[
        list[str], typer.Argument(metavar="SCRIPT [ARGUMENTS]...", help="The script to run.")
    ],
    module: Annotated[
        bool, typer.Option("-m", help="SCRIPT is the name of a module, as in python -m.")
    ] = False,
    num_ranks: Annotated[
        int, typer.Option("--nproc", min=1, help="Number of ranks to start on this machine.")
    ] = 1,
    steps: Annotated[
        int | None, typer.Option("--steps", min=1, help="Stop after this many updates.")
    ] = None,
    level: Annotated[
        str, typer.Option("--level", help="light: events only. deep: also reads values.")
    ] = "light",
    baseline: Annotated[
        Path | None,
        typer.Option(
            "--baseline", help="File of known findings to ignore; created if it does not exist."
        ),
    ] = None,
    sarif: Annotated[
        Path | None, typer.Option("--sarif", help="Also write the findings as SARIF 2.1.")
    ] = None,
    junit: Annotated[
        Path | None, typer.Option("--junit", help="Also write the findings as JUnit XML.")
    ] = None,
    json_file: JsonOption = None,
    debug: DebugOption = False,
) -> None:
    """Run any PyTorch training script and report what is wrong in its loop."""
    from surefoot.sanitizer import output
    from surefoot.sanitizer.request import Request
    from surefoot.sanitizer.supervise import audit as run_audit

    session: Session = context.obj
    if level not in LEVELS:
        raise RequestError(f"unknown level {level!r}", rule=f"one of {', '.join(LEVELS)}")
    # The script may change the working directory.
    places = {key: path and path.absolute() for key, path in (("s", sarif), ("j", junit))}
    base = baseline and baseline.absolute()
    request = Request(
        target=command[0],
        arguments=tuple(command[1:]),
        is_module=module,
        deep=level == "deep",
        max_updates=steps,
        num_ranks=num_ranks,
    )
    with _script_beside(session.json_target):
        result = run_audit(request)
    if result.is_reported_elsewhere:
        raise typer.Exit(result.exit_code)
    findings, known = output.without_baseline(result.findings, base)
    _write_files(findings, places["s"], places["j"])
    session.answer(
        {
            "findings": [finding.as_json() for finding in findings],
            "outcome": result.outcome,
            "updates": result.updates,
            "processes": result.num_processes,
            "exit_code_of_script": result.exit_code,
            "known_from_baseline": known,
            "internal_errors": result.internal_errors,
        }
    )
    _show(session, result, findings, known)
    code = result.exit_code
    if code == EXIT_DONE and any(f.certainty.value == "proof" for f in findings):
        code = EXIT_FOUND
    raise typer.Exit(code)


def _write_files(findings: list[Finding], sarif: Path | None, junit: Path | None) -> None:
    if sarif is None and junit is None:
        return
    # Both list the rules, which imports torch.
    from surefoot.sanitizer import formats

    if sarif is not None:
        sarif.write_text(formats.as_sarif(findings), encoding="utf-8")
    if junit is not None:
        junit.write_text(formats.as_junit(findings), encoding="utf-8")


@contextlib.contextmanager
def _script_beside(json_target: str | None) -> Iterator[None]:
    """If the answer uses standard output, the script's output goes to standard error."""
    if json_target != STANDARD_OUTPUT:
        yield
        return
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def _show(session: Session, result: Result, findings: list[Finding], known: int) -> None:
    from surefoot.sanitizer import output

    for finding in findings:
        severity = finding.severity.value
        place = f"{finding.file}:{finding.line}" if finding.file else "no single line"
        head = Text(f"\n{severity}", style=STYLES[severity])
        head.append(f" {finding.code} {finding.slug}", style="bold")
        head.append(f" ({finding.certainty.value})\n  {place}")
        session.console.print(head, soft_wrap=True)
        for number, line, here in output.excerpt(finding):
            session.say(f"  {'>' if here else ' '} {number:4d} | {line}", "" if here else "dim")
        session.say(f"  {finding.message}")
        if finding.fix:
            session.say(f"  fix: {finding.fix}", style="green")
    counts = {name: sum(f.severity.value == name for f in findings) for name in STYLES}
    numbers = ", ".join(f"{count} {name}{'s' * (count != 1)}" for name, count in counts.items())
    baseline = f"; {known} known from the baseline" if known else ""
    session.say(
        f"\naudit: {numbers}{baseline}; {result.updates} updates seen, script {result.outcome}"
        f" with exit code {result.exit_code}"
    )
    if result.internal_errors:
        session.say(
            f"{len(result.internal_errors)} observations failed inside the audit itself (the script"
            " was not affected); their findings are left out, --json lists all errors:",
            style="yellow",
        )
        for error in result.internal_errors[:MAX_ERRORS]:
            session.say(f"  {error.splitlines()[0]}", style="yellow")
    if findings:
        first = findings[0]
        session.next(
            (f"surefoot show rules {first.code}", "explanation with an example"),
            (f"# surefoot: ignore[{first.code}] reason", "on that line, if it is intended"),
        )
