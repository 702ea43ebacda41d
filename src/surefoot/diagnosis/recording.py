"""What a run recorded, as arrays by name: the only thing that the rules of the doctor see.

It holds what was recorded and nothing else: a number that is missing stays missing, and one that
is not finite stays what it is.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from surefoot.core.reports import Event
from surefoot.diagnosis.columns import EVALUATION, Name, canonical, in_unit, plain_name

Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Series:
    """One quantity over a run.

    Args:
        rows: [N] number of the row of the log that each value stands in, ascending.
        steps: [N] updates completed, as the log says; it may repeat or go back.
        values: [N] as recorded, NaN and infinities among them.
    """

    rows: NDArray[np.int64]
    steps: Floats
    values: Floats

    def __len__(self) -> int:
        return len(self.values)

    @cached_property
    def finite(self) -> Series:
        """The values that are finite."""
        return self.where(np.isfinite(self.values))

    @property
    def non_finite_rows(self) -> set[int]:
        return set(self.rows[~np.isfinite(self.values)].tolist())

    def where(self, mask: NDArray[np.bool_]) -> Series:
        return Series(self.rows[mask], self.steps[mask], self.values[mask])

    def step(self, position: int) -> int:
        return int(self.steps[position])


PART = "loss/"
"""What the name of a part of the loss begins with."""
REWARD = re.compile(r"(^|_)(rewards?|returns?|ep_rew|advantages?)(_|$)")
PLAYERS = (
    re.compile(r"^(d|disc|discriminator|critic|real|fake)(_|$)"),
    re.compile(r"^(g|gen|generator|adv|adversarial)(_|$)"),
)


class Objective(Enum):
    """What a run optimizes, as the names of its columns tell."""

    LOSS = "a loss that falls as the model learns"
    REWARD = "a reward: the loss of a policy gradient means nothing by itself"
    GAME = "the losses of players that train against each other, which mean nothing by themselves"


def are_players(names: Iterable[str]) -> bool:
    """Whether losses of these names are those of a generator and of who judges it."""
    found = list(names)
    return all(any(kind.search(name) for name in found) for kind in PLAYERS)


EMPTY = Series(np.empty(0, np.int64), np.empty(0), np.empty(0))


@dataclass(frozen=True, eq=False)
class Recording:
    """What one run left behind.

    Args:
        source: where it was read from.
        kind: which reader read it, for people.
        columns: canonical name → series; of several learning rates `lr` is the largest.
        evaluations: `SET/METRIC` → series, raw weights before averaged ones.
        sample_ids: row → ids of the samples of its window.
        events: what happened, first to last.
        facts: what is known of the run as a whole: `precision`, `clip_norm`, `num_classes`, ...
        ignored: columns of the log that no rule knows.
    """

    source: str
    kind: str
    num_rows: int
    columns: Mapping[str, Series]
    evaluations: Mapping[str, Series] = field(default_factory=dict)
    sample_ids: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    events: Sequence[Event] = ()
    facts: Mapping[str, object] = field(default_factory=dict)
    ignored: Sequence[str] = ()

    def __getitem__(self, name: str) -> Series:
        """The series of this name; an empty one where it was not recorded."""
        return self.columns.get(name, EMPTY)

    def has(self, *names: str) -> bool:
        return all(len(self[name]) > 0 for name in names)

    def aligned(self, *names: str) -> tuple[Floats, ...]:
        """Steps, then the values of each name, of the rows that hold all of them."""
        common = self[names[0]].rows
        for name in names[1:]:
            common = np.intersect1d(common, self[name].rows, assume_unique=True)
        picked = [self[name].where(np.isin(self[name].rows, common)) for name in names]
        return (picked[0].steps, *(series.values for series in picked))

    def value_in_row(self, name: str, row: int) -> float | None:
        """The value of a series in one row of the log."""
        series = self[name]
        position = int(np.searchsorted(series.rows, row))
        if position < len(series) and int(series.rows[position]) == row:
            return float(series.values[position])
        return None

    def step_of_row(self, row: int) -> int:
        """Updates completed, as the row says."""
        for series in self.columns.values():
            position = int(np.searchsorted(series.rows, row))
            if position < len(series) and int(series.rows[position]) == row:
                return series.step(position)
        return 0

    def before_row(self, name: str, row: int) -> Floats:
        """Finite values of a series before a row."""
        series = self[name].finite
        return series.values[series.rows < row]

    def family(self, prefix: str) -> dict[str, Series]:
        """Series called `PREFIX/NAME`, by NAME."""
        start = f"{prefix}/"
        return {k.removeprefix(start): v for k, v in self.columns.items() if k.startswith(start)}

    @cached_property
    def validation(self) -> tuple[str, Series]:
        """Name and loss of the validation set that was evaluated most; `("", empty)` for none."""
        losses = {k: v for k, v in self.evaluations.items() if k.endswith("/loss")}
        if not losses:
            return "", EMPTY
        name = max(losses, key=lambda key: len(losses[key]))
        return name.removesuffix("/loss"), losses[name]

    @cached_property
    def objective(self) -> Objective:
        """What the run optimizes."""
        names = [plain_name(name) for name in (*self.columns, *self.evaluations, *self.ignored)]
        if any(REWARD.search(name) for name in names):
            return Objective.REWARD
        parts = (key.removeprefix(PART) for key in self.columns if key.startswith(PART))
        return Objective.GAME if are_players(parts) else Objective.LOSS

    @property
    def has_loss(self) -> bool:
        """Whether a loss was read, of training or of an evaluation."""
        in_training = any(name == "loss" or name.startswith(PART) for name in self.columns)
        return in_training or any(name.endswith("/loss") for name in self.evaluations)

    def last_run(self) -> Recording:
        """Of several runs, appended to one file, the last; of one, itself.

        Another run begins where the steps are again what they were in the first row, and the loss
        is nearer to its first value than to the one just before.
        """
        loss = self["loss"].finite
        steps, values = loss.steps, loss.values
        back = [n for n in np.flatnonzero(np.diff(steps) < 0) + 1 if steps[n] <= steps[0]]
        starts = [n for n in back if abs(values[n] - values[0]) < abs(values[n] - values[n - 1])]
        if not starts or self.sample_ids or self.events:
            return self
        first = int(loss.rows[starts[-1]])

        def later(held: Mapping[str, Series]) -> dict[str, Series]:
            return {key: series.where(series.rows >= first) for key, series in held.items()}

        return dataclasses.replace(
            self,
            kind=f"{self.kind}, the last of {len(starts) + 1} runs in one file:",
            num_rows=self.num_rows - first,
            columns=later(self.columns),
            evaluations=later(self.evaluations),
        )

    @property
    def last_step(self) -> int:
        series = [*self.columns.values(), *self.evaluations.values()]
        return int(max((s.steps.max() for s in series if len(s)), default=0))


class RecordingBuilder:
    """Collects flat rows, one mapping of names to values each, and makes a `Recording` of them."""

    def __init__(self, source: str, kind: str) -> None:
        self.source, self.kind = source, kind
        self.events: list[Event] = []
        self.facts: dict[str, object] = {}
        self._cells: dict[Name, list[tuple[int, float, float]]] = {}
        self._sample_ids: dict[int, tuple[int, ...]] = {}
        self._ignored: dict[str, None] = {}
        self._num_rows = 0
        self._epoch_is_step = True
        self._epoch = self._written_step = math.inf
        self._interval, self._steps_before_epoch = 1.0, 0.0
        self.step = 0.0

    def add(self, row: Mapping[str, object]) -> None:
        """One row of the log, under its own names. A row without a step counts on."""
        named: dict[Name, object] = {}
        for name, value in row.items():
            known = canonical(name)
            if known is None and (measured := in_unit(name)) is not None:
                known, factor = measured
                amount = as_number(value)
                value = None if amount is None else amount * factor
            if known is None or known in named:
                self._ignored.setdefault(name)
            else:
                named[known] = value
        self.add_named(named)

    def add_named(self, row: Mapping[Name, object]) -> None:
        """One row under canonical names."""
        number = self._num_rows
        self._num_rows += 1
        self.step = self._next_step(row)
        for name, value in row.items():
            if name.name == "sample_ids":
                if isinstance(value, (list, tuple)):
                    self._sample_ids[number] = tuple(int(item) for item in value)
                continue
            amount = as_number(value)
            if amount is not None:
                self._cells.setdefault(name, []).append((number, self.step, amount))

    def _next_step(self, row: Mapping[Name, object]) -> float:
        """The step of a row: as it says; else its whole epoch; else one more than the last.

        A count that restarts with each epoch is continued.
        """
        step, epoch = (as_number(row.get(Name("", name))) for name in ("step", "epoch"))
        epoch = None if epoch is None or not math.isfinite(epoch) else epoch
        if Name("", "step") in row or (epoch is not None and epoch != int(epoch)):
            self._epoch_is_step = False
        if step is None:
            return epoch if epoch is not None and self._epoch_is_step else self.step + 1
        if step < self._written_step / 2 and epoch is not None and epoch > self._epoch:
            self._steps_before_epoch = self.step + self._interval - step
        elif step > self._written_step:
            self._interval = step - self._written_step
        self._written_step = step
        self._epoch = self._epoch if epoch is None else epoch
        return step + self._steps_before_epoch

    def build(self) -> Recording:
        columns: dict[str, Series] = {}
        evaluations: dict[str, Series] = {}
        for name, cells in sorted(self._cells.items()):
            table = np.array(cells, dtype=np.float64)
            series = Series(table[:, 0].astype(np.int64), table[:, 1], table[:, 2])
            if name.room.startswith(EVALUATION):
                evaluations[f"{name.room.removeprefix(EVALUATION)}/{name.name}"] = series
            else:
                columns[name.name] = series
        _add_sums_of_parts(columns, evaluations)
        rates = [s for key, s in columns.items() if key.startswith("lr/")]
        if rates and "lr" not in columns:
            columns["lr"] = _largest(rates)
        if "weight" not in columns and (items := _items_of_batches(columns)) is not None:
            columns["weight"] = items
        classes = columns.pop("num_classes", EMPTY).finite.values
        if len(classes) and (classes == classes[0]).all():
            self.facts.setdefault("num_classes", int(classes[0]))
        share = columns.get("device_utilization")
        if share is not None and len(share.finite) and share.finite.values.max() > 1.5:
            columns["device_utilization"] = Series(share.rows, share.steps, share.values / 100)
        return Recording(
            source=self.source,
            kind=self.kind,
            num_rows=self._num_rows,
            columns=columns,
            evaluations=evaluations,
            sample_ids=self._sample_ids,
            events=tuple(self.events),
            facts=self.facts,
            ignored=tuple(self._ignored),
        )


def _add_sums_of_parts(columns: dict[str, Series], evaluations: dict[str, Series]) -> None:
    """Where a log has only the parts of its loss, adds their sum; of losses that are no parts of
    one, such as those of several validation sets, each stands for itself."""
    parts = {
        key.removeprefix(PART): series for key, series in columns.items() if key.startswith(PART)
    }
    if "loss" not in columns and parts and not are_players(parts):
        columns["loss"] = _sum_of(list(parts.values()))
    sets: dict[str, dict[str, Series]] = {}
    for key in list(evaluations):
        set_name, mark, part = key.partition(f"/{PART}")
        if mark:
            sets.setdefault(set_name, {})[part] = evaluations.pop(key)
    for set_name, found in sets.items():
        if f"{set_name}/loss" not in evaluations and found.keys() <= parts.keys():
            evaluations[f"{set_name}/loss"] = _sum_of(list(found.values()))
        for part, series in found.items():
            evaluations.setdefault(f"{set_name} {part}/loss", series)


def _sum_of(series: Sequence[Series]) -> Series:
    """The sum in the rows that hold all of them."""
    rows = functools.reduce(np.intersect1d, (one.rows for one in series))
    kept = [one.where(np.isin(one.rows, rows)) for one in series]
    return Series(kept[0].rows, kept[0].steps, np.sum([one.values for one in kept], axis=0))


def _items_of_batches(columns: Mapping[str, Series]) -> Series | None:
    """The tokens or samples of each batch, where the column of that name does not count them up."""
    for name in ("tokens", "samples"):
        series = columns.get(name, EMPTY).finite
        if len(series) > 1 and bool((np.diff(series.values) < 0).any()):
            return series
    return None


def _largest(rates: Sequence[Series]) -> Series:
    """Of several learning rates, the largest of each row."""
    best: dict[int, tuple[float, float]] = {}
    for series in rates:
        for row, step, value in _cells_of(series):
            if row not in best or value > best[row][1]:
                best[row] = (step, value)
    rows = sorted(best)
    return Series(
        np.array(rows, np.int64),
        np.array([best[row][0] for row in rows]),
        np.array([best[row][1] for row in rows]),
    )


def _cells_of(series: Series) -> Iterator[tuple[int, float, float]]:
    yield from zip(series.rows.tolist(), series.steps.tolist(), series.values.tolist(), strict=True)


def as_number(value: object) -> float | None:
    """A value of a log as a float; None for what is no number or was not recorded.

    >>> as_number("1e-3"), as_number("-inf"), as_number(True), as_number(""), as_number([1])
    (0.001, -inf, 1.0, None, None)
    """
    if isinstance(value, (bool, int, float)):
        return float(value)
    if isinstance(value, str):
        text = value.strip().lower()
        if text in ("true", "false"):
            return float(text == "true")
        try:
            return float(text)
        except ValueError:
            return None
    return None
