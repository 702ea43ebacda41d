"""One update again: from the checkpoint before it to its window, with an eye on every module.

It leaves no trace in the run folder. What it needs is the run's recipe and data.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from torch import Tensor

from surefoot.assembly.checks import check_trainable
from surefoot.assembly.material import prepare_material
from surefoot.assembly.process import prepare_process
from surefoot.assembly.run_parts import Assembly, assemble
from surefoot.config.load import load_recipe
from surefoot.core.errors import CheckpointError, DataError, NonFiniteError, SpikeError
from surefoot.core.reports import StepReport
from surefoot.engine.first_bad import described
from surefoot.engine.reporting import ReportLog
from surefoot.engine.spike_guard import RollBack, RolledBack
from surefoot.engine.step import Update
from surefoot.engine.window import Window, leaving_out
from surefoot.numerics.clipping import tensor_norms
from surefoot.observe.bad_batches import read_event
from surefoot.observe.metrics_schema import number
from surefoot.observe.run_folder import CHECKPOINTS_NAME, config_of
from surefoot.run.resume_rules import BEGUN_FOR_KEY
from surefoot.state.checkpoint import list_checkpoints, read_checkpoint
from surefoot.state.tree import Snapshot

NUM_LARGEST = 5
BEGINNING = "the beginning"


@dataclass(frozen=True)
class Replay:
    """An update that was run again."""

    run: Path
    window: int
    begun_from: str
    """Name of the checkpoint, or `the beginning`."""
    num_rerun: int
    """Windows that were run again before it."""
    recorded: Mapping[str, float]
    found: Mapping[str, float]
    first_bad: Mapping[str, object]
    meaning: str
    """Of `first_bad`, for people."""
    largest_gradients: Mapping[str, float]
    """Parameters with the largest gradient norms of the update, before clipping."""

    @property
    def is_same(self) -> bool:
        """Whether loss and gradient norm are the recorded ones, to the bit."""
        return all(repr(self.recorded[name]) == repr(self.found[name]) for name in self.recorded)


def replay(path: Path) -> Replay:
    """Runs the update of an event again.

    Args:
        path: its folder below `artifacts/bad-batches`, or the `event.json` there.

    Raises:
        RequestError: it is no event, or its run began in Python.
        DataError: the run's data ends before that window.
    """
    run, event = read_event(path)
    data: Any = event["data"]
    window_number: int = data["window"]
    roll_backs = [RollBack(**fields) for fields in cast(Any, event.get("roll_backs", []))]
    begun_from = _choose(run / CHECKPOINTS_NAME, window_number, roll_backs)
    recipe = load_recipe(config_of(run)).recipe
    process = prepare_process(recipe.settings)
    material = prepare_material(recipe).material
    check_trainable(material, recipe.settings)
    with closing(
        assemble(material, recipe.settings, process, lambda pace: begun_from.begun_for)
    ) as assembly:
        update = assembly.make_update()
        if begun_from.snapshot is not None:
            assembly.trainable.state.restore(begun_from.snapshot)
        assembly.trainable.optimizing.guard.spikes.roll_backs = roll_backs
        first = update.parts.log.progress.window
        window = _rerun(assembly, update, window_number)
        return _look(assembly, update, window, run, window_number, begun_from.name, first, data)


@dataclass(frozen=True)
class BegunFrom:
    """Where a replay begins."""

    name: str = BEGINNING
    snapshot: Snapshot | None = None
    begun_for: int | None = None
    """The horizon that the run began with, in updates; None where no checkpoint says it."""


def _choose(checkpoints: Path, window: int, roll_backs: list[RollBack]) -> BegunFrom:
    """The newest checkpoint of the same course before the window."""
    begun_for: int | None = None
    for folder in reversed(list_checkpoints(checkpoints)):
        try:
            manifest, snapshot = read_checkpoint(folder)
        except CheckpointError:
            continue
        # The same in all checkpoints of a run, whatever its horizon has become.
        begun_for = manifest.about.get(BEGUN_FOR_KEY) or begun_for
        if _leads_to(snapshot, window, roll_backs):
            return BegunFrom(folder.name, snapshot, begun_for)
    return BegunFrom(begun_for=begun_for)


def _leads_to(snapshot: Snapshot, window: int, roll_backs: list[RollBack]) -> bool:
    """Whether the training went from this checkpoint to that window, as it was then."""
    at = snapshot.values["progress"]["window"]
    known = [RollBack(**fields) for fields in snapshot.values["guard"]["spikes"]["roll_backs"]]
    # What was left out only later must not lie behind the checkpoint.
    return at < window and all(back in roll_backs or at <= back.last_window for back in known)


def _rerun(assembly: Assembly, update: Update, number: int) -> Window:
    """Trains up to the window and returns it."""
    log = update.parts.log
    progress = log.progress
    first = progress.window + 1
    with closing(assembly.open_windows(progress.cursor)) as opened:
        windows = leaving_out(opened, first, log.guard.spikes.is_left_out)
        for at, window in enumerate(windows, start=first):
            if at == number:
                _settle(log)
                return window
            update(window)
            _settle(log)
    raise DataError(
        f"the data ends before window {number}",
        where=f"after window {progress.window}",
        rule="a replay runs the same data",
        remedy="bring the data of the run back",
    )


def _settle(log: ReportLog) -> None:
    """Whatever the guard says of the updates before, they were made."""
    try:
        log.settle()
    except (NonFiniteError, SpikeError, RolledBack):
        return


def _look(
    assembly: Assembly,
    update: Update,
    window: Window,
    run: Path,
    number_of_window: int,
    begun_from: str,
    first: int,
    data: Mapping[str, Any],
) -> Replay:
    parts = update.parts
    denominators = parts.sum_over_ranks(window.weights)
    norms: dict[str, float] = {}

    def measured(gradients: Any) -> Tensor:
        names = [n for n, p in assembly.material.model.named_parameters() if p.grad is not None]
        if len(names) == len(gradients):
            norms.update(zip(names, tensor_norms(gradients).tolist(), strict=True))
        return global_norm(gradients)

    global_norm = parts.global_norm
    first_bad = assembly.trainable.first_bad.find(window, denominators)
    Update(replace(parts, global_norm=measured))(window)
    _settle(parts.log)
    report = cast(StepReport, parts.log.latest)
    recorded = {name: number(data[name]) for name in ("loss", "grad_norm")}
    largest = sorted(norms.items(), key=lambda item: -_sortable(item[1]))[:NUM_LARGEST]
    return Replay(
        run,
        number_of_window,
        begun_from,
        number_of_window - 1 - first,
        recorded,
        {"loss": report.loss, "grad_norm": report.grad_norm},
        first_bad,
        described(first_bad),
        dict(largest),
    )


def _sortable(value: float) -> float:
    return float("inf") if value != value else value
