"""The page of several runs: verdict, overlaid curves, differences."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from surefoot.judge.compare import ComparisonOutcome, RunComparison
from surefoot.judge.statistics import Spread
from surefoot.observe.files.atomic import atomic_write
from surefoot.observe.readers.run_data import RunData
from surefoot.report import overview
from surefoot.report.markup import PageSection, chip, details, duration, escape, table, tag
from surefoot.report.markup import number as shown
from surefoot.report.page import curves_body, page
from surefoot.report.series import page_data

LEVELS = {
    ComparisonOutcome.BETTER: "good",
    ComparisonOutcome.WORSE: "bad",
    ComparisonOutcome.DIFFERENT: "warn",
    ComparisonOutcome.NO_DIFFERENCE: "",
    ComparisonOutcome.NOT_SHOWN: "warn",
}
AREAS = {"config": "Configuration", "code": "Code", "data": "Data", "environment": "Environment"}
MAX_RUNS = 12


def write_comparison(runs: Sequence[RunData], comparison: RunComparison, target: Path) -> Path:
    """Writes the page of a comparison; returns its path."""
    atomic_write(target, comparison_page(runs, comparison))
    return target


def comparison_page(runs: Sequence[RunData], comparison: RunComparison) -> str:
    """The page as HTML."""
    drawn = runs[:MAX_RUNS]
    marks = [overview.marks_of(run, ()) for run in drawn]
    curves = page_data(drawn, comparison.labels[: len(drawn)], marks)
    sections = [
        PageSection("curves", "Curves", curves_body(curves)),
        PageSection("metrics", "Metrics", _metrics(comparison) + _values(comparison)),
        PageSection("differences", "Differences", _differences(comparison)),
        PageSection("contracts", "Contracts", _contracts(comparison)),
    ]
    return page("Comparison · Surefoot", _head(runs, comparison), sections, curves)


def _head(runs: Sequence[RunData], comparison: RunComparison) -> str:
    deciding = [r for r in comparison.results if r.metric == comparison.deciding]
    level = LEVELS[deciding[0].outcome] if deciding else "warn"
    claim = comparison.claim[:1].upper() + comparison.claim[1:]
    rows = [
        (
            label,
            run.name,
            chip(run.summary.status.value, overview.LEVEL_OF_STATUS[run.summary.status]),
            "–" if run.summary.step is None else f"{run.summary.step:,}",
            run.config.get("seed", "–"),
            duration(run.seconds if run.stretches else None),
        )
        for label, run in zip(comparison.labels, runs, strict=True)
    ]
    return (
        tag("p", f"{len(runs)} runs", class_="eyebrow").text
        + tag("h1", "Comparison").text
        + tag("div", tag("p", f"{claim}.", class_="claim"), class_=f"verdict {level}").text
        + '<div style="height:14px"></div>'
        + table(("", "run", "status", "updates", "seed", "run time"), rows, numbers=(3, 4, 5))
    )


def _metrics(comparison: RunComparison) -> str:
    if not comparison.results:
        return '<p class="soft">Nothing was evaluated.</p>'
    rows = []
    for result in comparison.results:
        name = result.metric + (" (decides)" if result.metric == comparison.deciding else "")
        rows.append(
            (
                name,
                result.experiment,
                chip(result.outcome.value, LEVELS[result.outcome]),
                spread_text(result.before),
                spread_text(result.after),
                result.reason,
            )
        )
    first = comparison.experiments[0].label
    return table(("metric", "runs", "", f"before ({first})", "after", "because"), rows)


def spread_text(spread: Spread | None) -> str:
    """Mean, deviation and count of the values of an experiment."""
    if spread is None:
        return "–"
    if spread.count == 1:
        return f"{shown(spread.mean)} (n=1)"
    return f"{shown(spread.mean)} ± {shown(spread.deviation)} (n={spread.count})"


def _values(comparison: RunComparison) -> str:
    rows = [
        (name, *("–" if pair is None else f"{shown(pair[1])} at {pair[0]:,}" for pair in pairs))
        for name, pairs in comparison.values.items()
    ]
    body = table(("metric", *comparison.labels), rows, numbers=range(1, len(comparison.labels) + 1))
    return (
        details("Every value", body, open_=len(comparison.labels) <= 4)
        + '<p class="note">± is the standard deviation over seeds. Of many metrics, one in '
        "twenty differs by chance; the deciding one counts.</p>"
    )


def _differences(comparison: RunComparison) -> str:
    body = ""
    for area, title in AREAS.items():
        rows = [(fact.name, *fact.values) for fact in comparison.facts if fact.area == area]
        body += f"<h3>{escape(title)}</h3>"
        if rows:
            body += table(("", *comparison.labels), rows, kinds="path")
        else:
            body += '<p class="soft">No recorded difference.</p>'
    return body


def _contracts(comparison: RunComparison) -> str:
    body = ""
    for label, verdict in zip(comparison.labels, comparison.verdicts, strict=True):
        if verdict is not None:
            body += f"<h3>{escape(label)}: {escape(verdict.claim)}</h3>" + overview.clauses(verdict)
    return body or '<p class="soft">None of these runs has a contract.</p>'
