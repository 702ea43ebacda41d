"""Draws live-view.svg from the log of a run: python docs/images/make_live_view.py RUN [STEP].

Shows the run as the terminal showed it after STEP updates (default: two thirds of the way). Every
number in the picture is one of the run's.
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

from surefoot.config.load import load_recipe
from surefoot.core.reports import EvalReport, StepReport
from surefoot.observe.metrics_log import read_rows
from surefoot.observe.terminal.picture import frame_as_svg
from surefoot.observe.terminal.view import RunFacts, Tracker

PICTURE = Path(__file__).with_name("live-view.svg")


def report_of(kind: type, row: dict[str, Any]) -> Any:
    """The report that a row of the log was written from, as far as the view needs it."""
    names = {field.name for field in dataclasses.fields(kind)}
    values = {name: value for name, value in row.items() if name in names}
    return kind(**{**values, "sample_ids": ()} if kind is StepReport else values)


def main(run: Path, until: int | None) -> None:
    """Replays the rows of a run and draws its view."""
    recipe = load_recipe(run / "config.yaml").recipe
    total = int(recipe.train.horizon.value)
    until = until or total * 2 // 3
    facts = RunFacts(
        name=recipe.name,
        folder=f"runs/{run.name}",
        total=total,
        counts="tokens",
        device="cpu",
        precision="fp32",
    )
    rows = [row for row in read_rows(run / "metrics.jsonl") if int(str(row["step"])) <= until]
    tracker = Tracker(facts, float(str(rows[0]["time"])) - float(str(rows[0]["step_seconds"])))
    report = None
    for row in rows:
        if row["row"] == "eval":
            tracker.note_eval(report_of(EvalReport, row))
        else:
            report = report_of(StepReport, row)
            view = tracker.view(report, report.time)
    PICTURE.write_text(frame_as_svg(view), encoding="utf-8")
    print(f"{PICTURE}: step {view.done:.0f} of {total}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else None)
