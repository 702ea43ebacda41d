"""Everything that one run left on disk, read into memory.

Also reads running, failed and killed runs: what is missing is empty, what is damaged is listed in
`problems`. Interprets nothing and changes nothing.
"""

from __future__ import annotations

import json
import math
import re
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from pydantic_core import from_json

from surefoot.config.yaml_text import read_yaml
from surefoot.core.errors import ConfigError
from surefoot.core.reports import Event
from surefoot.observe.events import read_events
from surefoot.observe.metrics_schema import NON_FINITE
from surefoot.observe.readers.runs import RunSummary, summarise_run
from surefoot.observe.readers.stretches import Stretch, stretches_of
from surefoot.observe.run_folder import (
    CHECKPOINTS_NAME,
    CONFIG_NAME,
    CONTRACT_NAME,
    EVENTS_NAME,
    METRICS_NAME,
    RECORD_NAME,
    find_run,
)

NAN = math.nan


class StepColumns:
    """The rows of updates as columns of numbers; a mapping in a row becomes columns `name/key`.

    A missing value is NaN; a NaN or infinity that was logged is also in `non_finite`.
    """

    def __init__(self) -> None:
        self.count = 0
        self.columns: dict[str, array[float]] = {}
        self.non_finite: dict[str, list[int]] = {}
        """Column to the indices of rows in which its value was logged as non-finite."""

    def add(self, row: Mapping[str, Any]) -> None:
        """Adds one row."""
        index = self.count
        self.count += 1
        for name, value in _numbers(row):
            column = self.columns.get(name)
            if column is None:
                column = self.columns[name] = array("d")
            if len(column) < index:
                column.extend([NAN] * (index - len(column)))
            if isinstance(value, str):
                self.non_finite.setdefault(name, []).append(index)
            column.append(float(value))

    def close(self) -> None:
        """Pads all columns to equal length."""
        for column in self.columns.values():
            column.extend([NAN] * (self.count - len(column)))

    def column(self, name: str) -> Sequence[float]:
        """The values of a column, one per row; NaN where it was not logged."""
        return self.columns.get(name) or array("d", [NAN] * self.count)

    def has(self, name: str) -> bool:
        """Whether any row has a finite value in this column."""
        return any(math.isfinite(value) for value in self.columns.get(name, ()))

    def last(self, name: str) -> float | None:
        """The latest value, NaN and infinities included; None if it was never logged."""
        column = self.columns.get(name)
        return column[-1] if column else None


def _numbers(row: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in row.items():
        if isinstance(value, Mapping):
            yield from _numbers(value, f"{above}{name}/")
        elif isinstance(value, int | float) or (isinstance(value, str) and value in NON_FINITE):
            yield f"{above}{name}", value


@dataclass(frozen=True, slots=True)
class Evaluated:
    """One evaluation of one validation set."""

    step: int
    set_name: str
    metrics: Mapping[str, float]
    weight: float
    samples: int
    weights: str
    seconds: float
    time: float


@dataclass(frozen=True)
class RunData:
    """The files of one run."""

    path: Path
    summary: RunSummary
    config: Mapping[str, Any]
    """Empty if the run ended before it wrote one."""
    origins: Mapping[str, str]
    """Dotted path of each configuration value to its origin."""
    contract: Mapping[str, Any]
    record: Mapping[str, Any]
    later_records: tuple[Mapping[str, Any], ...]
    """What each resume has recorded."""
    steps: StepColumns
    evaluations: tuple[Evaluated, ...]
    events: tuple[Event, ...]
    problems: tuple[str, ...] = field(default=())
    """What could not be read, as messages."""

    @property
    def name(self) -> str:
        return self.path.name

    @cached_property
    def stretches(self) -> tuple[Stretch, ...]:
        """The attempts of the run."""
        times = self.steps.columns.get("time")
        return stretches_of(self.events, times[-1] if times else None)

    @property
    def seconds(self) -> float:
        """Wall time over all attempts, without the time between them."""
        return sum(stretch.seconds for stretch in self.stretches)

    @property
    def device_hours(self) -> float:
        """Number of devices times hours, over all attempts; a CPU run counts as one device."""
        return sum(stretch.device_seconds for stretch in self.stretches) / 3600

    @property
    def deciding(self) -> tuple[str | None, str, str]:
        """Validation set (None: the first), metric and direction by which runs are judged."""
        found = self.extra.get("deciding_metric")
        fields: Mapping[str, Any] = found if isinstance(found, Mapping) else {}
        direction = str(fields.get("direction", "min"))
        return fields.get("set"), str(fields.get("name", "loss")), direction

    @property
    def extra(self) -> Mapping[str, Any]:
        """Further facts that the run has recorded about itself."""
        extra = self.record.get("extra")
        return extra if isinstance(extra, Mapping) else {}

    def latest(self) -> dict[str, float]:
        """The latest value of each metric, as SET/METRIC."""
        return {
            f"{evaluated.set_name}/{metric}": value
            for evaluated in self.evaluations
            for metric, value in evaluated.metrics.items()
        }

    def judged(self, which: str) -> dict[str, tuple[int, float]]:
        """Step and value of each metric, as SET/METRIC, at the evaluation that counts.

        Args:
            which: `last`, or `best`: the step with the best deciding metric among those whose
                checkpoints were kept.
        """
        step = self.best_kept_step() if which == "best" else None
        if which == "best" and step is None:
            return {}
        return {
            f"{evaluated.set_name}/{metric}": (evaluated.step, value)
            for evaluated in self.evaluations
            for metric, value in evaluated.metrics.items()
            if step is None or evaluated.step == step
        }

    def best_kept_step(self) -> int | None:
        """The step of the best remaining checkpoint, by the deciding metric."""
        name, direction = self.deciding_name(), self.deciding[2]
        names = (path.name for path in (self.path / CHECKPOINTS_NAME).glob("step-*"))
        kept = {int(name[5:]) for name in names if re.fullmatch("step-[0-9]{8,}", name)}
        found = [
            (value if direction == "min" else -value, step)
            for step, value in self.history(name or "")
            if step in kept and math.isfinite(value)
        ]
        return min(found)[1] if found else None

    def deciding_name(self) -> str | None:
        """The deciding metric as SET/METRIC; None if nothing was evaluated and none is named."""
        set_name, metric, _ = self.deciding
        if set_name is None and self.evaluations:
            set_name = self.evaluations[0].set_name
        return None if set_name is None else f"{set_name}/{metric}"

    def history(self, name: str) -> list[tuple[int, float]]:
        """(step, value) of a metric named SET/METRIC, in order."""
        return [
            (evaluated.step, value)
            for evaluated in self.evaluations
            for metric, value in evaluated.metrics.items()
            if f"{evaluated.set_name}/{metric}" == name
        ]

    def artifacts(self, pattern: str) -> list[Path]:
        """Artifacts whose names match a glob pattern."""
        return sorted((self.path / "artifacts").glob(pattern))


def read_run(path: str | Path) -> RunData:
    """Reads a run folder, whatever the state of its run.

    Raises:
        RunFolderError: it is not a run folder.
    """
    path = find_run(path).absolute()
    problems: list[str] = []
    config, origins = _read_config(path / CONFIG_NAME, problems)
    contract, _ = _read_config(path / CONTRACT_NAME, problems)
    later = sorted(path.glob("record.resume-*.json"), key=lambda p: (len(p.name), p.name))
    steps, evaluations = _read_metrics(path / METRICS_NAME, problems)
    events_path = path / EVENTS_NAME
    return RunData(
        path=path,
        summary=summarise_run(path),
        config=config,
        origins=origins,
        contract=contract,
        record=_read_json(path / RECORD_NAME, problems),
        later_records=tuple(_read_json(record, problems) for record in later),
        steps=steps,
        evaluations=tuple(evaluations),
        events=tuple(read_events(events_path)) if events_path.is_file() else (),
        problems=tuple(problems),
    )


def read_contract(path: Path) -> dict[str, Any]:
    """The content of a contract file; empty if missing or damaged."""
    return _read_config(path, [])[0]


def _read_config(path: Path, problems: list[str]) -> tuple[dict[str, Any], dict[str, str]]:
    """The values, and the comment behind each, which holds its origin."""
    try:
        text = path.read_text("utf-8")
        given, lines = read_yaml(text, path.name)
    except FileNotFoundError:
        problems.append(f"{path.name} is missing")
        return {}, {}
    except (OSError, UnicodeDecodeError, ConfigError) as error:
        problems.append(f"{path.name} cannot be read: {error}")
        return {}, {}
    written = text.splitlines()
    origins = {}
    for name, line in lines.items():
        _, mark, comment = written[line - 1].rpartition("  # ")
        origins[name] = comment if mark else ""
    return given, origins


def _read_json(path: Path, problems: list[str]) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text("utf-8"))
        if not isinstance(found, dict):
            raise ValueError("it is no object")
        return found
    except FileNotFoundError:
        problems.append(f"{path.name} is missing")
    except (OSError, ValueError) as error:
        problems.append(f"{path.name} cannot be read: {error}")
    return {}


def _read_metrics(path: Path, problems: list[str]) -> tuple[StepColumns, list[Evaluated]]:
    steps, evaluations = StepColumns(), []
    if path.is_file():
        with open(path, "rb") as file:
            for number, line in enumerate(file, start=1):
                if not line.endswith(b"\n"):
                    break  # Torn by a kill, or still being written.
                try:
                    row = from_json(line)
                    if row["row"] == "step":
                        steps.add(row)
                    elif row["row"] == "eval":
                        evaluations.append(_evaluated(row))
                except (ValueError, KeyError, TypeError):
                    problems.append(f"{path.name}: line {number} is not a row")
    else:
        problems.append(f"{path.name} is missing")
    steps.close()
    return steps, evaluations


def _evaluated(row: Mapping[str, Any]) -> Evaluated:
    return Evaluated(
        step=int(row["step"]),
        set_name=str(row["name"]),
        metrics={str(name): float(value) for name, value in row["metrics"].items()},
        weight=float(row["weight"]),
        samples=int(row["samples"]),
        weights=str(row["weights"]),
        seconds=float(row["seconds"]),
        time=float(row["time"]),
    )
