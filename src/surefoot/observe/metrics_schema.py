"""The columns of `metrics.jsonl`: their meaning, and which ones a resumed run repeats exactly.

A deterministic column is compared with `==` after a resume; a measured one holds times and memory.
Reads and writes no log.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Literal

FORMAT = 1
NON_FINITE = ("NaN", "Infinity", "-Infinity")

Kind = Literal["deterministic", "measured"]
Reduction = Literal["sum", "mean", "weighted mean", "max", "last"]


@dataclass(frozen=True, slots=True)
class MetricsColumn:
    """One column of one kind of row."""

    name: str
    kind: Kind
    unit: str
    description: str
    reduction: Reduction = "last"
    """How several rows are summarised: their sum, largest, mean (weighted by `weight` if it says
    so) or last value."""


def _exact(name: str, unit: str, description: str, reduction: Reduction = "last") -> MetricsColumn:
    return MetricsColumn(name, "deterministic", unit, description, reduction)


def _measured(
    name: str, unit: str, description: str, reduction: Reduction = "mean"
) -> MetricsColumn:
    return MetricsColumn(name, "measured", unit, description, reduction)


RESOURCE_COLUMNS = (
    _measured(
        "memory_allocated_bytes", "bytes", "allocated on the device now, each second or so", "max"
    ),
    _measured(
        "memory_reserved_bytes", "bytes", "held by torch's allocator, each second or so", "max"
    ),
    _measured(
        "energy_joules",
        "J",
        "used by the device since the process began",
        "last",
    ),
    _measured(
        "mfu", "1", "share of the device's dense peak, each second or so, null unless both known"
    ),
)
RESOURCES = tuple(column.name for column in RESOURCE_COLUMNS)
STEP_COLUMNS = (
    _exact("row", "", "`step`: one row per window, applied or skipped"),
    _exact("step", "updates", "updates completed after this one"),
    _exact("window", "windows", "windows consumed so far; unique in a log"),
    _exact("epoch", "epochs", "epoch of the last sample of the window"),
    _exact("samples", "samples", "samples seen so far, over all data-parallel ranks"),
    _exact("tokens", "tokens", "loss-bearing tokens seen so far; 0 where the task counts none"),
    _exact("loss", "loss", "loss sum of the whole window over its denominator", "weighted mean"),
    _exact("terms", "loss", "each term of a loss that has several", "weighted mean"),
    _exact(
        "weight", "items", "denominator: loss-bearing items of the update, over all ranks", "sum"
    ),
    _exact("grad_norm", "gradient", "global gradient norm before clipping", "mean"),
    _exact("clipped", "", "whether the gradient was scaled down", "mean"),
    _exact("applied", "", "false where the update was skipped", "mean"),
    _exact("lr", "1/update", "learning rate of each parameter group, as this update used it"),
    _exact("loss_scale", "", "loss scale of this update; 1.0 where none is needed"),
    _exact("sample_ids", "", "ids of this rank's samples; null where there are more than 64"),
    _exact("sample_ids_digest", "", "BLAKE2b-64 of the ids as little-endian 64-bit integers"),
    _exact("weight_norm", "weight", "global norm of the weights after it; null if not taken"),
    _exact("details", "", "further signals of a sampled window, by name; else empty"),
    _measured("step_seconds", "s", "wall time since the end of the update before", "sum"),
    _measured("data_seconds", "s", "part of it spent waiting for data", "sum"),
    _measured("tokens_per_second", "tokens/s", "its tokens over its wall time; null unknown"),
    _measured("samples_per_second", "samples/s", "its samples over its wall time; null unknown"),
    _measured("memory_bytes", "bytes", "peak allocated on the device, or resident on CPU", "max"),
    _measured("device_utilization", "1", "share of time the device was busy lately; null unknown"),
    *RESOURCE_COLUMNS,
    _measured("time", "s", "Unix time at which the numbers had arrived", "last"),
)

DETAILS = (
    _exact(
        "update_ratio",
        "1",
        "how far the update moved the weights, over their norm (of at most 4 million of them)",
        "mean",
    ),
    _exact("clip_fraction", "1", "share of clipped updates since the sample before", "mean"),
    _exact(
        "dead_units",
        "1",
        "share of units whose ReLU, GELU or SiLU gave nothing for any item of "
        "the window (of rank 0)",
        "mean",
    ),
    _exact("saturated_units", "1", "share of tanh and sigmoid outputs near their ends", "mean"),
    _exact(
        "padding_waste",
        "1",
        "share of positions that bear no loss: padding, prompts (of rank 0)",
        "mean",
    ),
    _exact(
        "expert_load_max",
        "1",
        "choices of the most loaded expert of any layer, over the mean of its layer",
        "mean",
    ),
    _exact("expert_load_min", "1", "the same of the least loaded expert", "mean"),
    _exact("dropped_tokens", "1", "share of the routers' choices beyond the capacity", "mean"),
    _exact(
        "grad_norm/PARAMETER", "gradient", "gradient norm of one parameter of log.layers", "mean"
    ),
    _exact(
        "weight_norm/PARAMETER", "weight", "norm of one parameter of log.layers after the update"
    ),
)
"""Names in `details`; a signal that does not apply to a run is absent."""

EVAL_COLUMNS = (
    _exact("row", "", "`eval`: one row per evaluation of one validation set"),
    _exact("step", "updates", "updates completed when it was evaluated"),
    _exact("name", "", "name of the validation set"),
    _exact("metrics", "", "metric name to value; `loss` is always there"),
    _exact("gap", "loss", "its loss less the mean training loss of the last 50 updates"),
    _exact("weight", "items", "loss-bearing items that the loss was averaged over"),
    _exact("samples", "samples", "samples evaluated"),
    _exact("weights", "", "which weights: `raw` or `ema`"),
    _measured("seconds", "s", "wall time of the evaluation"),
    _measured("time", "s", "Unix time at its end"),
)

ROWS: Mapping[str, tuple[MetricsColumn, ...]] = {"step": STEP_COLUMNS, "eval": EVAL_COLUMNS}

_DETERMINISTIC = {
    row: tuple(column.name for column in columns if column.kind == "deterministic")
    for row, columns in ROWS.items()
}


def schema() -> dict[str, object]:
    """The content of `metrics.schema.json`."""
    return {
        "format": FORMAT,
        "non_finite": "numbers that JSON lacks stand as the strings " + ", ".join(NON_FINITE),
        "rows": {
            row: {
                column.name: {k: v for k, v in asdict(column).items() if k != "name"}
                for column in columns
            }
            for row, columns in {**ROWS, "details": DETAILS}.items()
        },
    }


def reduced(rows: Sequence[Mapping[str, object]]) -> dict[str, object]:
    """One row that summarises several step rows, each column by its declared reduction.

    Null values are left out; a column that is null in all rows stays null. Columns that are not
    numbers take the last value.
    """
    found: dict[str, object] = {}
    for column in STEP_COLUMNS:
        there = [row for row in rows if row.get(column.name) is not None]
        if not there:
            found[column.name] = None
        elif column.reduction == "last" or not _are_numbers(there, column.name):
            found[column.name] = there[-1][column.name]
        else:
            found[column.name] = _REDUCE[column.reduction](there, column.name)
    return found


def _are_numbers(rows: Sequence[Mapping[str, object]], name: str) -> bool:
    return all(isinstance(row[name], bool | int | float) or row[name] in NON_FINITE for row in rows)


def _values(rows: Sequence[Mapping[str, object]], name: str) -> list[float]:
    return [number(row[name]) for row in rows]


def _weighted_mean(rows: Sequence[Mapping[str, object]], name: str) -> float:
    weights = _values(rows, "weight")
    total = sum(weights)
    pairs = zip(_values(rows, name), weights, strict=True)
    return sum(value * weight for value, weight in pairs if weight) / total if total else 0.0


_REDUCE: Mapping[str, Callable[[Sequence[Mapping[str, object]], str], float]] = {
    "sum": lambda rows, name: sum(_values(rows, name)),
    "max": lambda rows, name: max(_values(rows, name)),
    "mean": lambda rows, name: sum(_values(rows, name)) / len(rows),
    "weighted mean": _weighted_mean,
}


def deterministic(row: Mapping[str, object]) -> dict[str, object]:
    """The columns of a row that two equal runs share, comparable with `==`.

    Non-finite numbers stay strings, so that NaN equals itself.
    """
    return {name: row[name] for name in _DETERMINISTIC[str(row["row"])]}


def number(value: object) -> float:
    """A number of a row as a float, including the strings for non-finite ones.

    Raises:
        ValueError: the value is not a number.
    """
    if isinstance(value, (int, float)) or value in NON_FINITE:
        return float(value)
    raise ValueError(f"{value!r} is not a number")
