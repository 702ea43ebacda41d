"""Rows of our own metrics log, and of logs that nest their values. Changes no number."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from surefoot.core.reports import Event
from surefoot.diagnosis.columns import EVALUATION, Name, canonical
from surefoot.diagnosis.recording import RecordingBuilder, as_number

MARKS = frozenset({"kind", "message"})
"""Keys that make an object of a log an event and not a row."""
ERRORS = ("error", "exception", "traceback")
MESSAGES = ("message", *ERRORS, "text", "msg")
"""Where an event says what happened."""
NOT_MEASURED = frozenset({"event", "step", "global_step", "epoch", "time", *MESSAGES})


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


def event_of(row: Mapping[str, Any], step: float) -> Event | None:
    """The event that a row tells of, or None: by `kind` and `message`, by a name under `event`, or
    by the text of an error alone.

    It says itself at which step it was, or stands between the rows: after the one of `step`. What
    else it lacks is empty.
    """
    kind = row.get("kind") if row.keys() >= MARKS else row.get("event")
    if kind is None and any(isinstance(row.get(name), str) for name in ERRORS):
        kind = "error"
    if not isinstance(kind, str) or not kind.strip():
        return None
    data = row.get("data")
    said = [as_number(row[name]) for name in row if canonical(name) == Name("", "step")]
    texts = (row[name] for name in MESSAGES if isinstance(row.get(name), str))
    return Event(
        kind=kind.strip(),
        step=int(next((number for number in said if number is not None), step)),
        message=next((text for text in texts if text.strip()), ""),
        data=dict(data) if isinstance(data, Mapping) else {},
        time=as_number(row.get("time")) or 0.0,
    )


def take(builder: RecordingBuilder, row: Mapping[str, Any]) -> None:
    """A row of anybody's log: numbers, an event, or both."""
    if (event := event_of(row, builder.step)) is not None:
        builder.events.append(event)
        numbers = {n: v for n, v in row.items() if n not in NOT_MEASURED}
        if row.keys() >= MARKS or not any(as_number(v) is not None for v in numbers.values()):
            return
    add_row(builder, row)
