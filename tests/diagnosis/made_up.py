"""Columns of logs that are made up, and what the doctor says of them."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from surefoot.core.reports import Event
from surefoot.diagnosis.doctor import Diagnosis, examine
from surefoot.diagnosis.recording import Floats, RecordingBuilder

COUNT = 400
STEPS = np.arange(COUNT)
LOG_10 = math.log(10)


def noise(size: float, seed: int = 0) -> Floats:
    return size * np.random.default_rng(seed).normal(size=COUNT)


def falling(start: float = 2.3, end: float = 0.4, over: float = 50.0) -> Floats:
    return end + (start - end) * np.exp(-STEPS / over)


def cosine(peak: float = 1e-3) -> Floats:
    return peak * (0.5 + 0.5 * np.cos(np.pi * STEPS / COUNT)) + 1e-9


def examined(
    columns: Mapping[str, Floats],
    *,
    validation: Mapping[int, float] | None = None,
    accuracy: float | Mapping[int, float] | None = None,
    facts: Mapping[str, object] | None = None,
    events: tuple[Event, ...] = (),
) -> Diagnosis:
    """A log of these columns, one row for each step, with evaluations at some of the steps."""
    builder = RecordingBuilder("log", "made up")
    builder.facts.update(facts or {})
    builder.events.extend(events)
    lengths = {len(column) for column in columns.values()}
    for n in range(lengths.pop()):
        row: dict[str, object] = {"step": n, **{k: float(v[n]) for k, v in columns.items()}}
        if validation and n in validation:
            row["val_loss"] = validation[n]
            if accuracy is not None:
                row["val_accuracy"] = accuracy if isinstance(accuracy, float) else accuracy[n]
        builder.add(row)
    assert not lengths
    return examine(builder.build())


def first(diagnosis: Diagnosis) -> str | None:
    return diagnosis.findings[0].slug if diagnosis.findings else None
