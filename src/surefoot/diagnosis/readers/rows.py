"""Rows of our own metrics log, and of logs that nest their values. Changes no number."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from surefoot.core.reports import Event
from surefoot.diagnosis.columns import EVALUATION, Name, canonical
from surefoot.diagnosis.recording import RecordingBuilder, as_number


def add_row(builder: RecordingBuilder, row: Mapping[str, Any]) -> None:
    """One row of the metrics log of a run, or a flat one of anybody's."""
    if row.get("row") == "eval" and isinstance(row.get("metrics"), Mapping):
        _add_evaluation(builder, row)
    else:
        builder.add(_flat(row))


def _add_evaluation(builder: RecordingBuilder, row: Mapping[str, Any]) -> None:
    weights = row.get("weights", "raw")
    set_name = str(row.get("name", "validation")) + ("" if weights == "raw" else f" {weights}")
    named: dict[Name, object] = {Name("", "step"): row.get("step")}
    for metric, value in row["metrics"].items():
        named[Name(EVALUATION + set_name, str(metric))] = value
    builder.add_named(named)


def _flat(row: Mapping[str, Any]) -> dict[str, object]:
    """Nested mappings as `OUTER/INNER`; one that has a single entry keeps the plain name."""
    flat: dict[str, object] = {}
    for name, value in row.items():
        if not isinstance(value, Mapping):
            flat[name] = value
        elif len(value) == 1 and name == "lr":
            flat[name] = next(iter(value.values()))
        else:
            flat.update({f"{name}/{inner}": item for inner, item in value.items()})
    return flat


def event_of(row: Mapping[str, Any], step: float) -> Event:
    """An event of a log, that says itself at which step it was, or stands between the rows: after
    the one of `step`. What else it lacks is empty."""
    data = row.get("data")
    said = [as_number(row[name]) for name in row if canonical(name) == Name("", "step")]
    return Event(
        kind=str(row["kind"]),
        step=int(next((number for number in said if number is not None), step)),
        message=str(row["message"]),
        data=dict(data) if isinstance(data, Mapping) else {},
        time=float(row.get("time") or 0.0),
    )
