"""One readable update for people who keep their own loop. It fetches no data, writes no folder."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from surefoot.assembly.compilation import choose_compilation
from surefoot.assembly.given_parts import GivenParts, OwnSchedule
from surefoot.assembly.process import join_process
from surefoot.assembly.task_layout import place_task
from surefoot.assembly.update_parts import make_trainable, make_update
from surefoot.config.building import make_schedule
from surefoot.config.load import resolve_settings
from surefoot.config.sections import Settings
from surefoot.core.counting import Pace, updates_in
from surefoot.core.errors import CheckpointError, RequestError
from surefoot.core.reports import Event, StepReport
from surefoot.data.batch import SINGLE_TERM, MicroBatch, move_to
from surefoot.data.order import Cursor
from surefoot.engine.evaluate import evaluate
from surefoot.engine.step import Update
from surefoot.engine.sum_check import FewSamples, check_sums
from surefoot.engine.window import gather_window
from surefoot.numerics.clipping import Clip
from surefoot.numerics.modes import refuse_evaluation_mode
from surefoot.observe.events import EventKind
from surefoot.observe.observers import as_observer
from surefoot.optim.own import MakeOptimizer
from surefoot.optim.update import Course
from surefoot.parallel.compilation import uncompiled
from surefoot.run.resume_rules import BEGUN_FOR_KEY, Resumption, accept_differences
from surefoot.state.checkpoint import newest_whole, write_checkpoint
from surefoot.state.commit import put_back
from surefoot.state.manifest import Manifest
from surefoot.state.retention import clear_left
from surefoot.tasks.given import as_task, checked_model
from surefoot.tasks.task import FunctionTask, LossSum, Task, leading_size

SETTINGS_KEY = "settings"
"""In `about` of a checkpoint: all settings that it was trained with."""


class TrainStep:
    """Makes updates: call it with the micro-batches of one window.

    `step(batch)` is one update of one batch; `step(first, second, third)` one update of three,
    whose gradient is that of their union however unequal they are. Batches come from the CPU:
    their weights are counted there, before they are moved.

    The host runs one update ahead of the device, so a call returns the report of the update
    *before*; `settle()` waits for the last one.

    Args:
        model: any module; it is moved to the device. What has `requires_grad` is trained.
        task: one of `surefoot.tasks`, or a plain `loss(model, batch) -> sum` over its samples.
        settings: the sections `train` (`horizon` and `clip_norm` matter here), `optimizer`,
            `schedule`, `precision`, `guard`, `ema`, `device`; or a `Settings`.
        observers: objects with some of the methods of `Observer`; they receive every report.
        optimizer: one of your own: a class or function from parameter groups to a
            `torch.optim.Optimizer`.
        schedule: one of your own: a function from updates completed to a multiplier of the rate.
        clip: one of your own: a function `(gradients, norm)` that changes gradients in place.

    Raises:
        ConfigError: everything that is wrong with the settings, at once.
        RequestError: the model is no module, the task no task, or a part cannot be used; or
            `train.accumulation` is given.

    >>> model = nn.Linear(4, 1)
    >>> step = TrainStep(
    ...     model,
    ...     lambda model, batch: ((model(batch[0]) - batch[1]) ** 2).sum(),
    ...     settings={"train": {"horizon": "10 steps"}, "optimizer": {"lr": 0.01}},
    ...     optimizer=torch.optim.RAdam,
    ...     schedule=lambda n: 0.5**n,
    ... )
    >>> for _ in range(2):
    ...     _ = step((torch.randn(8, 4), torch.randn(8, 1)))
    >>> step.settle().lr["decay"]
    0.005
    >>> step
    TrainStep(Linear, update 2)
    """

    def __init__(
        self,
        model: nn.Module,
        task: Task | Callable[[nn.Module, Any], LossSum],
        *,
        settings: Mapping[str, Any] | Settings,
        observers: Sequence[object] = (),
        optimizer: MakeOptimizer | None = None,
        schedule: OwnSchedule | None = None,
        clip: Clip | None = None,
    ) -> None:
        self._given = GivenParts.of(optimizer, schedule, clip)
        self._resolved = resolve_settings(_of_one_call(settings), given=self._given.names())
        self.settings: Settings = self._resolved.config
        if self.settings.train.accumulation != 1:
            raise RequestError(
                "TrainStep does not take train.accumulation",
                where="settings",
                rule="a window is the batches of one call",
                remedy="leave it out, and call step(first, second, third, fourth)",
            )
        if self.settings.guard.spikes == "roll-back":
            raise RequestError(
                "TrainStep cannot roll back",
                where="guard.spikes",
                rule="going back takes checkpoints and data that are the run's own",
                remedy="use guard.spikes=skip or log, or a Trainer",
            )
        self._own_task = as_task(task)
        process = join_process(self.settings)
        self.device = process.device
        if process.place.mesh is not None:
            raise RequestError(
                "TrainStep trains on one rank, and this is one of several",
                where="parallel",
                rule="over several ranks the batches of all make up a window",
                remedy="use surefoot.Trainer, or audit your own loop",
            )
        self._pace = Pace(samples_per_update=1)
        horizon = updates_in(self.settings.train.horizon, self._pace)
        place, device = process.place, process.device
        self._compilation = choose_compilation(
            checked_model(model), self.settings, device, place, self._pace, horizon
        )
        self.settings = self._compilation.settle(self.settings)
        self.task = place_task(self._own_task, model, self.settings, None)
        made = make_schedule(self.settings, self._pace, given=self._given.schedule)
        self._trainable = make_trainable(
            model, self.task, self.settings, made, process, self._given
        )
        told = tuple(map(as_observer, observers))
        self._update = make_update(self._trainable, self.settings, told)
        self._log = self._update.parts.log
        self.model = model
        self._begun_for = horizon if isinstance(horizon, int) else None
        self._is_loss_checked = False

    def __repr__(self) -> str:
        return f"TrainStep({type(self.model).__name__}, update {self.num_updates})"

    @property
    def num_updates(self) -> int:
        """Updates completed, as far as their reports have arrived."""
        return self._trainable.state.progress.step

    def __call__(self, *batches: Any) -> StepReport | None:
        """One update over `batches`, the micro-batches of its window.

        Returns:
            The report of the update before, or None for the first.

        Raises:
            NonFiniteError: the update before was not finite and the guard stops.
            DataError: a batch cannot be counted or holds a value out of range.
            ModelError: the whole model is in evaluation mode, or the loss does not add up.
            RequestError: there is no batch.
        """
        if not batches:
            raise RequestError(
                "step() was called without a batch",
                rule="an update needs at least one micro-batch",
                remedy="call step(batch), or step(*batches) with a list that is not empty",
            )
        if not self.model.training:
            refuse_evaluation_mode(self.model)
        if not self._is_loss_checked:
            self._is_loss_checked = True
            if isinstance(self._own_task, FunctionTask):
                few = FewSamples.cut_from(batches[0])
                with uncompiled(self._compilation.extent):
                    coupling = few and check_sums(self.model, self._own_task, few, self.device)
                if coupling:
                    event = Event(EventKind.NOTE, self.num_updates, coupling, {}, time.time())
                    self._log.tell(event)
        window = gather_window([self._micro_batch(batch) for batch in batches])
        self._update(window)
        return self._log.latest

    def settle(self) -> StepReport | None:
        """Waits for the update in flight; returns the latest report."""
        self._log.settle()
        return self._log.latest

    def evaluate(self, batches: Iterable[Any]) -> dict[str, float]:
        """Metrics over all `batches`, exact for any batch size; leaves no trace."""
        self._log.settle()
        micro_batches = (self._micro_batch(batch) for batch in batches)
        found = evaluate(
            self.model, self.task, micro_batches, self._trainable.precision, self.device
        )
        return dict(found.metrics)

    def save(self, folder: str | Path) -> Path:
        """Publishes a whole checkpoint below `folder`; returns its own folder.

        All of them stay; one of the same step is replaced. The folder belongs to this one step:
        what earlier saves left half written is cleared.
        """
        self._log.settle()
        checkpoints = Path(folder)
        put_back(checkpoints)
        about = {
            "config_hash": self._resolved.digest,
            SETTINGS_KEY: self._resolved.as_dict(),
            "data": {},
            BEGUN_FOR_KEY: self._begun_for,
            "torch": torch.__version__,
            "device": self.device.type,
        }
        path = write_checkpoint(
            checkpoints, self.num_updates, self._trainable.state.capture(), about
        )
        clear_left(checkpoints)
        return path

    def resume(self, folder: str | Path, *, accept: Sequence[str] = ()) -> int:
        """Restores the newest whole checkpoint below `folder`; returns the updates completed.

        Observers hear of newer ones that were refused. The batches are the caller's: that they go
        on where they were is not checked.

        Args:
            accept: dotted paths of settings that may differ from those of the checkpoint.

        Raises:
            CheckpointError: there is none, or it is of another model or without settings.
            RequestError: the settings differ in what was not accepted.
        """
        checkpoints = Path(folder)
        put_back(checkpoints)
        _, manifest, snapshot, refused = newest_whole(checkpoints)
        self._check_settings(manifest, accept)
        self._trainable.state.restore(snapshot)
        for error in refused:
            text = f"a newer checkpoint was refused: {error}"
            self._log.tell(Event(EventKind.NOTE, self.num_updates, text, {}, time.time()))
        return self.num_updates

    def _check_settings(self, manifest: Manifest, accept: Sequence[str]) -> None:
        settings = manifest.about.get(SETTINGS_KEY)
        if not isinstance(settings, Mapping):
            raise CheckpointError(
                "the checkpoint does not say with what settings it was trained",
                where=f"manifest.json: about.{SETTINGS_KEY}",
                rule="TrainStep.resume goes on from what TrainStep.save has written",
                remedy="begin from its weights alone: export them with surefoot checkpoint export",
            )
        before = resolve_settings(settings)
        changes = accept_differences(before, self._resolved, accept)
        resumption = Resumption(before.config, tuple(changes), tuple(accept))
        begun_for = resumption.begun_for(manifest, self._pace) or self._begun_for
        schedule = make_schedule(self.settings, self._pace, begun_for, self._given.schedule)
        resumption.check(manifest, {}, schedule, self._pace)
        parts = self._update.parts
        course = Course(schedule, self._trainable.optimizing.plateau)
        self._update, self._begun_for = Update(replace(parts, course=course)), begun_for

    def _micro_batch(self, batch: Any) -> MicroBatch:
        weight = self.task.weight(batch)
        samples = leading_size(batch) or 1
        return MicroBatch(
            data=move_to(batch, self.device, non_blocking=True),
            weights=dict(weight) if isinstance(weight, dict) else {SINGLE_TERM: float(weight)},
            samples=samples,
            ids=(),
            cursor_after=Cursor(),
            ends_window=True,
        )


def _of_one_call(settings: Mapping[str, Any] | Settings) -> Mapping[str, Any] | Settings:
    """The settings with a micro-batch size; it says nothing, as the batches are the caller's."""
    if isinstance(settings, Settings) or not isinstance(settings, Mapping):
        return settings
    train = settings.get("train", {})
    if not isinstance(train, Mapping):
        return settings
    return {**settings, "train": {"micro_batch": 1, **train}}
