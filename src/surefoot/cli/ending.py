"""The end of a run in the command line: writes the page and judges the contract.

An error while writing the page is reported and does not change the result of the run.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from surefoot.cli.session import Session, cells, table
from surefoot.core.errors import EXIT_DONE, EXIT_FOUND, EXIT_STOPPED

if TYPE_CHECKING:
    from surefoot.judge.verdict import ContractVerdict

STYLES = {"held": "green", "broken": "bold red", "not enough evidence": "yellow"}


class Ending:
    """Called once, with the folder of a run that has ended."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self.verdict: ContractVerdict | None = None
        self.report: Path | None = None

    def __call__(self, folder: Path) -> None:
        from surefoot.judge.contract import verdict_on
        from surefoot.observe.readers.run_data import read_run
        from surefoot.report.run_page import write_page

        try:
            run = read_run(folder)
            self.verdict = verdict_on(run)
            self.report = write_page(run)
        except Exception as error:
            self._session.say(f"note: the report was not written: {error}", style="yellow")

    def code(self, status: str) -> int:
        """The exit code for a run's final status.

        A finished run whose contract is not shown to hold stops a pipeline; so does a stopped one
        whose contract is broken, such as by its budget.
        """
        verdict = self.verdict
        if status == "stopped":
            is_broken = verdict is not None and verdict.standing.value == "broken"
            return EXIT_FOUND if is_broken else EXIT_STOPPED
        is_held = verdict is None or verdict.standing.value == "held"
        return EXIT_DONE if is_held else EXIT_FOUND


def show_verdict(session: Session, verdict: ContractVerdict) -> None:
    """Prints the claim and each clause."""
    style = STYLES[verdict.standing.value]
    session.say(f"\n{verdict.claim}", style=style if style.startswith("bold") else f"bold {style}")
    shown = table("clause", "", "promised", "found")
    for clause in verdict.clauses:
        name, standing, promised, found = cells(
            clause.name, clause.standing.value, clause.promised, clause.found
        )
        standing.stylize(STYLES[clause.standing.value])
        shown.add_row(name, standing, promised, found)
    session.console.print(shown)
