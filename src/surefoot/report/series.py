"""Converts the rows of runs to the curves of a page, with a bounded number of points.

Long curves are divided into buckets that keep their smallest and largest value, so that no spike is
lost. Non-finite values are gaps here and marks on the time axis.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from surefoot.observe.readers.run_data import RunData, StepColumns
from surefoot.observe.readers.stretches import elapsed_at

MAX_POINTS = 2000
"""Largest number of points of a curve without buckets."""
MAX_BUCKETS = 800
SIGNIFICANT_DIGITS = 5
AXES = ("step", "tokens", "samples", "time")


@dataclass(frozen=True, slots=True)
class CurveSpec:
    """One kind of curve of a page."""

    id: str
    title: str
    unit: str
    columns: tuple[str, ...]
    """Columns of the step rows, drawn as lines."""
    log: bool = False
    """Whether a logarithmic axis is offered, as the default."""
    smooth: bool = False
    """Whether a moving average is drawn over the values."""
    note: str = ""


CURVES = (
    CurveSpec("grad_norm", "Gradient norm", "before clipping", ("grad_norm",), True, True),
    CurveSpec("lr", "Learning rate", "per update", ()),
    CurveSpec("throughput", "Throughput", "", (), smooth=True),
    CurveSpec("memory", "Memory", "peak, bytes", ("memory_bytes",)),
    CurveSpec(
        "step_seconds", "Time of an update", "s", ("step_seconds", "data_seconds"), smooth=True
    ),
    CurveSpec("weight_norm", "Weight norm", "", ("weight_norm",)),
    CurveSpec("utilization", "Device busy", "share of time", ("device_utilization",)),
    CurveSpec("loss_scale", "Loss scale", "", ("loss_scale",), True),
)


def page_data(
    runs: Sequence[RunData], labels: Sequence[str], marks: Sequence[Sequence[Mapping[str, Any]]]
) -> dict[str, Any]:
    """Everything that the script of a page draws, as plain JSON values.

    Args:
        labels: name of each run in legends; empty strings for a single run.
        marks: for each run, the marks on the time axis: `step`, `kind` and `text`.
    """
    budget = max(100, MAX_BUCKETS // len(runs))
    grids: list[dict[str, Any]] = []
    charts: dict[str, dict[str, Any]] = {}
    for index, run in enumerate(runs):
        clock = _Clock(run)
        rows = _buckets(run.steps.count, MAX_POINTS // len(runs), budget)
        grids.append(_step_grid(run, rows, clock))
        drawn = _Drawing(index, labels[index], run.steps, rows, grids, len(grids) - 1)
        _add_loss(charts, drawn, run, grids, clock)
        for curve in CURVES:
            columns = _columns_of(curve, run)
            if curve.id == "throughput" and columns:
                curve = replace(curve, unit=f"{_counted(run)}/s")
            if columns and not (curve.id == "loss_scale" and _is_flat(run.steps, columns)):
                drawn.add_to(charts, curve, columns)
    return {
        "runs": [
            {"label": label, "marks": [_placed(mark, run) for mark in of_run]}
            for label, run, of_run in zip(labels, runs, marks, strict=True)
        ],
        "axes": [axis for axis in AXES if any(any(grid.get(axis, ())) for grid in grids)],
        "grids": grids,
        "charts": list(charts.values()),
    }


class _Clock:
    """Run time of a run at a Unix time."""

    def __init__(self, run: RunData) -> None:
        self._stretches = run.stretches
        times = run.steps.columns.get("time")
        self._zero = times[0] if times else 0.0

    def __call__(self, moment: float) -> float:
        if self._stretches:
            return elapsed_at(self._stretches, moment)
        return moment - self._zero


@dataclass(frozen=True)
class _Drawing:
    """Converts columns of one run to series."""

    run: int
    label: str
    steps: StepColumns
    rows: Sequence[range]
    grids: list[dict[str, Any]]
    grid: int

    def add_to(
        self, charts: dict[str, dict[str, Any]], curve: CurveSpec, columns: Mapping[str, str]
    ) -> None:
        chart = charts.setdefault(curve.id, _chart(curve))
        for column, name in columns.items():
            label = " ".join(part for part in (self.label, name) if part)
            if sparse := self._sparse(column):
                chart["series"].append(
                    {"run": self.run, "label": label or curve.title.lower(), "dots": True, **sparse}
                )
                continue
            chart["series"].append(
                {
                    "run": self.run,
                    "label": label or curve.title.lower(),
                    "grid": self.grid,
                    "smooth": curve.smooth,
                    **_values(self.steps.column(column), self.rows),
                }
            )

    def _sparse(self, column: str) -> dict[str, Any] | None:
        """The values of a sparse column on its own grid; None for other columns."""
        values = self.steps.column(column)
        found = [i for i, value in enumerate(values) if math.isfinite(value)]
        if len(found) * 2 > len(values) or len(found) > MAX_POINTS:
            return None
        own: dict[str, list[float | None]] = {}
        inside = self.grids[self.grid]
        ends = [bucket[-1] for bucket in self.rows]
        for axis, places in inside.items():
            own[axis] = [places[min(bisect_left(ends, i), len(ends) - 1)] for i in found]
        self.grids.append(own)
        return {"grid": len(self.grids) - 1, "y": [_finite(values[i]) for i in found]}


def _chart(curve: CurveSpec) -> dict[str, Any]:
    return {
        "id": curve.id,
        "title": curve.title,
        "unit": curve.unit,
        "log": curve.log,
        "series": [],
    }


def _add_loss(
    charts: dict[str, dict[str, Any]],
    drawn: _Drawing,
    run: RunData,
    grids: list[dict[str, Any]],
    clock: _Clock,
) -> None:
    loss = CurveSpec("loss", "Loss", "", (), log=True, smooth=True)
    if run.steps.has("loss"):
        drawn.add_to(charts, loss, {"loss": "train"})
        charts["loss"]["wide"] = True
    places = _places_of(run)
    for set_name in dict.fromkeys(e.set_name for e in run.evaluations):
        of_set = [e for e in run.evaluations if e.set_name == set_name]
        grids.append(
            {
                "step": [e.step for e in of_set],
                "time": [_short(clock(e.time)) for e in of_set],
                **{axis: [places(e.step, axis) for e in of_set] for axis in ("tokens", "samples")},
            }
        )
        for metric in dict.fromkeys(name for e in of_set for name in e.metrics):
            # Training and validation losses share a chart; other metrics have one per name.
            curve = loss if metric == "loss" else CurveSpec(f"metric-{metric}", metric, "", ())
            chart = charts.setdefault(curve.id, _chart(curve))
            if metric == "loss":
                chart["wide"] = True
            label = " ".join(part for part in (drawn.label, set_name) if part)
            values = [_finite(e.metrics.get(metric, math.nan)) for e in of_set]
            chart["series"].append(
                {
                    "run": drawn.run,
                    "label": label,
                    "grid": len(grids) - 1,
                    "dots": True,
                    "y": values,
                }
            )


def _places_of(run: RunData) -> Any:
    """`(step, axis) -> value`: tokens or samples seen at a step."""
    steps = run.steps.column("step")
    at: dict[str, dict[int, float | None]] = {}
    for axis in ("tokens", "samples"):
        pairs = zip(steps, run.steps.column(axis), strict=True)
        at[axis] = {int(step): _short(value) for step, value in pairs if math.isfinite(step)}
    return lambda step, axis: 0 if step == 0 else at[axis].get(step)


def _columns_of(curve: CurveSpec, run: RunData) -> dict[str, str]:
    """Columns of a curve that this run has, with their names in the legend."""
    steps = run.steps
    if curve.id == "lr":
        found = [name for name in steps.columns if name.startswith("lr/")]
        same = {tuple(steps.columns[name]) for name in found}
        if len(same) == 1:
            return {found[0]: ""}
        return {name: name.removeprefix("lr/") for name in found}
    if curve.id == "throughput":
        column = f"{_counted(run)}_per_second"
        return {column: ""} if steps.has(column) else {}
    found = [name for name in curve.columns if steps.has(name)]
    named = {"step_seconds": "update", "data_seconds": "waiting for data"}
    return {name: named.get(name, "") for name in found}


def _counted(run: RunData) -> str:
    return "tokens" if any(run.steps.column("tokens")) else "samples"


def _is_flat(steps: StepColumns, columns: Mapping[str, str]) -> bool:
    return all(len(set(steps.columns[name])) <= 1 for name in columns)


def _buckets(count: int, most_points: int, buckets: int) -> list[range]:
    """Ranges of rows, one per point."""
    if count <= most_points:
        return [range(i, i + 1) for i in range(count)]
    edges = [round(i * count / buckets) for i in range(buckets + 1)]
    return [range(a, b) for a, b in pairwise(edges)]


def _step_grid(run: RunData, rows: Sequence[range], clock: _Clock) -> dict[str, Any]:
    grid: dict[str, Any] = {}
    for axis in ("step", "tokens", "samples"):
        column = run.steps.column(axis)
        if any(column):
            grid[axis] = [_short(column[bucket[-1]]) for bucket in rows]
    times = run.steps.column("time")
    grid["time"] = [_short(clock(times[bucket[-1]])) for bucket in rows]
    return grid


def _values(column: Sequence[float], rows: Sequence[range]) -> dict[str, Any]:
    """`y`, and `lo` and `hi` if a point stands for several rows."""
    if all(len(bucket) == 1 for bucket in rows):
        return {"y": [_finite(column[bucket[0]]) for bucket in rows]}
    y, low, high = [], [], []
    for bucket in rows:
        values = [column[i] for i in bucket if math.isfinite(column[i])]
        y.append(_short(sum(values) / len(values)) if values else None)
        low.append(_short(min(values)) if values else None)
        high.append(_short(max(values)) if values else None)
    return {"y": y, "lo": low, "hi": high}


def _finite(value: float) -> float | None:
    return _short(value) if math.isfinite(value) else None


def _short(value: float) -> float:
    """Rounds to as many digits as are visible."""
    if value == 0 or not math.isfinite(value):
        return 0.0
    digits = max(SIGNIFICANT_DIGITS, math.ceil(math.log10(abs(value))) + 1)
    rounded = float(f"{value:.{digits}g}")
    return int(rounded) if rounded.is_integer() else rounded


def _placed(mark: Mapping[str, Any], run: RunData) -> dict[str, Any]:
    """A mark with its position on each axis, for the script."""
    steps = run.steps.column("step")
    step = float(mark["step"])
    index = min(bisect_left(steps, step), run.steps.count - 1)
    placed = {**mark}
    if index >= 0:
        placed["tokens"] = _short(run.steps.column("tokens")[index]) if step else 0
        placed["samples"] = _short(run.steps.column("samples")[index]) if step else 0
    if run.stretches and mark.get("time"):
        placed["time"] = _short(elapsed_at(run.stretches, float(mark["time"])))
    elif index >= 0:
        placed["time"] = _short(_Clock(run)(run.steps.column("time")[index]))
    return placed
