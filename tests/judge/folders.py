"""Run folders as runs would leave them, made in a moment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from surefoot.core.reports import EvalReport, Event, StepReport
from surefoot.observe.events import EventLog
from surefoot.observe.metrics_log import MetricsLog
from surefoot.observe.run_folder import RunFolder

BUDGET = {
    "device_hours": "none",
    "wall_clock": "none",
    "cost": "none",
    "price_per_device_hour": "none",
}
CONTRACT: dict[str, Any] = {
    "kind": "research",
    "task": "tell digits",
    "metric": {"name": "accuracy", "direction": "max"},
    "target": "none",
    "judged": "last",
    "baseline": "none",
    "slices": [],
    "budget": BUDGET,
    "resume": "T2",
}
CONFIG: dict[str, Any] = {"name": "digits", "seed": 0, "optimizer": {"kind": "sgd", "lr": 0.1}}


def step_report(step: int, loss: float) -> StepReport:
    return StepReport(
        step=step,
        window=step,
        epoch=0,
        samples=8 * step,
        tokens=0,
        loss=loss,
        terms={},
        weight=8.0,
        grad_norm=1.0 / step,
        clipped=False,
        applied=True,
        lr={"decay": 0.1, "no_decay": 0.1},
        loss_scale=1.0,
        step_seconds=0.5,
        data_seconds=0.1,
        memory_bytes=1 << 20,
        time=1000.0 + step,
    )


def make_folder(
    path: Path,
    *,
    evaluations: Sequence[Mapping[str, float]] = ({"validation/accuracy": 0.9},),
    config: Mapping[str, Any] = CONFIG,
    contract: Mapping[str, Any] | None = CONTRACT,
    events: Sequence[Event] | None = None,
    record: Mapping[str, Any] | None = None,
    losses: Sequence[float] = (3.0, 2.0, 1.0),
) -> Path:
    """A finished run of a few updates, evaluated after the last ones.

    Args:
        evaluations: for each of the last steps, the values as SET/METRIC.
        events: default: a start, and an end after 3600 seconds.
    """
    last = len(losses)
    if events is None:
        events = [Event("start", 0, "started", {"devices": 1}, 1000.0), finished(last)]
    with RunFolder.create_at(path) as folder:
        folder.write_config(config)
        if contract is not None:
            folder.write_contract(contract)
        deciding = {"name": "accuracy", "direction": "max"}
        found = {"extra": {"deciding_metric": deciding}, **(record or {})}
        folder.write_record(found)
        event_log = EventLog(folder.events_path)
        for event in events:
            event_log.on_event(event)
        event_log.close()
        log = MetricsLog(folder.metrics_path)
        for step, loss in enumerate(losses, start=1):
            log.on_step(step_report(step, loss))
            index = step - last + len(evaluations) - 1
            for report in _evaluations(step, evaluations[index] if index >= 0 else {}):
                log.on_eval(report)
        log.close()
    return path


def _evaluations(step: int, values: Mapping[str, float]) -> list[EvalReport]:
    sets: dict[str, dict[str, float]] = {}
    for name, value in values.items():
        set_name, _, metric = name.partition("/")
        sets.setdefault(set_name, {"loss": 1.0})[metric] = value
    return [
        EvalReport(step, name, metrics, 1.0, 1, seconds=0.2, time=1000.0 + step)
        for name, metrics in sets.items()
    ]


def finished(step: int, moment: float = 4600.0) -> Event:
    return Event("finished", step, "the horizon is reached", {}, moment)
