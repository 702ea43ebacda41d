"""`surefoot compare`: compares runs, with a verdict. Reads run folders only."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from surefoot.cli.session import DebugOption, JsonOption, Session, cells, table
from surefoot.core.errors import EXIT_DONE, EXIT_FOUND, RequestError

if TYPE_CHECKING:
    from surefoot.judge.compare import RunComparison
    from surefoot.observe.readers.run_data import RunData

STYLES = {"better": "green", "worse": "bold red", "not enough evidence": "yellow"}
MAX_PACKAGES = 12


def compare(
    context: typer.Context,
    runs: Annotated[
        list[Path], typer.Argument(metavar="A B [C ...]", help="Run folders; A is the reference.")
    ],
    html: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write a page with overlaid curves."),
    ] = None,
    json_file: JsonOption = None,
    debug: DebugOption = False,
) -> int:
    """Compare runs: differences, and each metric with its spread over seeds.

    Runs that differ only in the seed repeat one experiment. A difference between two experiments
    is claimed from three seeds of each. Exit code 1 if a metric is significantly worse, or a run
    other than the first broke its contract.
    """
    from surefoot.judge.compare import compare_runs
    from surefoot.observe.readers.run_data import read_run

    session: Session = context.obj
    if len(runs) < 2:
        raise RequestError(
            "only one run is named",
            where="surefoot compare",
            rule="at least two are compared",
            remedy="surefoot compare A B",
        )
    read = [read_run(path) for path in runs]
    comparison = compare_runs(read)
    code = EXIT_FOUND if comparison.stops_a_pipeline else EXIT_DONE
    session.answer({"exit_code": code, **_facts(read, comparison)})
    _show(session, read, comparison)
    if html is not None:
        from surefoot.report.comparison import write_comparison

        session.say(f"\n{write_comparison(read, comparison, html)}", style="bold")
    session.next(
        (f"surefoot report {runs[-1]}", "one of them as a page"),
        (f"surefoot compare {' '.join(map(str, runs))} --html FILE", "overlaid curves"),
    )
    return code


def _facts(runs: list[RunData], comparison: RunComparison) -> dict[str, object]:
    return {
        "claim": comparison.claim,
        "deciding": comparison.deciding,
        "runs": {
            label: {"path": run.path, "status": run.summary.status, "step": run.summary.step}
            for label, run in zip(comparison.labels, runs, strict=True)
        },
        "experiments": [experiment.label for experiment in comparison.experiments],
        "differences": comparison.facts,
        "values": comparison.values,
        "results": comparison.results,
        "contracts": {
            label: None if verdict is None else verdict.as_json()
            for label, verdict in zip(comparison.labels, comparison.verdicts, strict=True)
        },
    }


def _show(session: Session, runs: list[RunData], comparison: RunComparison) -> None:
    shown = table("", "run", "status", "updates", "seed")
    for label, run in zip(comparison.labels, runs, strict=True):
        step = "-" if run.summary.step is None else f"{run.summary.step:,}"
        seed = run.config.get("seed", "-")
        shown.add_row(*cells(label, run.name, run.summary.status.value, step, seed))
    session.console.print(shown)
    _show_differences(session, comparison)
    _show_metrics(session, comparison)
    for label, verdict in zip(comparison.labels, comparison.verdicts, strict=True):
        if verdict is not None:
            session.say(f"\n{label}: {verdict.claim}")
    session.say(f"\n{comparison.claim}", style="bold")


def _show_differences(session: Session, comparison: RunComparison) -> None:
    if not comparison.facts:
        session.say("\nno recorded difference in configuration, code, data or environment")
        return
    shown = table("differs in", "", *comparison.labels)
    packages = 0
    for fact in comparison.facts:
        packages += fact.name.startswith("package.")
        if not fact.name.startswith("package.") or packages <= MAX_PACKAGES:
            shown.add_row(*cells(fact.area, fact.name, *fact.values))
    session.say("")
    session.console.print(shown)
    if packages > MAX_PACKAGES:
        session.say(f"and {packages - MAX_PACKAGES} more packages (--json has all)", style="dim")


def _show_metrics(session: Session, comparison: RunComparison) -> None:
    from surefoot.report.comparison import spread_text

    shown = table("metric", *comparison.labels)
    for name, pairs in comparison.values.items():
        values = ("-" if pair is None else f"{pair[1]:.6g} at {pair[0]:,}" for pair in pairs)
        shown.add_row(*cells(name, *values))
    session.say("")
    session.console.print(shown)
    shown = table("metric", "runs", "before", "after", "", "because")
    for result in comparison.results:
        before, after = spread_text(result.before), spread_text(result.after)
        row = cells(
            result.metric, result.experiment, before, after, result.outcome.value, result.reason
        )
        row[4].stylize(STYLES.get(result.outcome.value, ""))
        shown.add_row(*row)
    session.say("")
    session.console.print(shown)
