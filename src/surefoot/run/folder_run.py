"""One run in its folder: start or resume, train, save, record, end. It chooses no part of a run.

Whatever happens, the folder says so: a failure leaves its traceback, a stop its checkpoint.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from surefoot.assembly.run_parts import Assembly
from surefoot.core.budget import Budget
from surefoot.core.disk import free_bytes
from surefoot.core.errors import RankError, SurefootError
from surefoot.core.interruption import CutShort, ShouldAbort, no_exit
from surefoot.core.peaks import dense_peak
from surefoot.core.reports import Event, Observer
from surefoot.engine.cadence import AtEnd
from surefoot.engine.evaluate import left_when
from surefoot.engine.first_bad import described
from surefoot.engine.interrupt import StopOnSignal
from surefoot.engine.loop import Loop, LoopParts, Outcome
from surefoot.engine.spike_guard import RollBack
from surefoot.engine.window import Window, leaving_out
from surefoot.observe.bad_batches import keep_batch
from surefoot.observe.events import EventKind, EventLog, failure_event
from surefoot.observe.latest import LatestMetrics
from surefoot.observe.metrics_log import MetricsLog
from surefoot.observe.observers import Observers
from surefoot.observe.probes import ResourceProbe, UtilizationProbe
from surefoot.observe.run_folder import RunFolder
from surefoot.observe.time_ledger import TIME_LEDGER_NAME, LedgerReading, Phase, add_stretch
from surefoot.observe.watch import HangWatch, stacks_path
from surefoot.parallel.lookout import LookoutHooks
from surefoot.run.budget_watch import Spending, budget_of
from surefoot.run.cadences import make_cadence, make_horizon
from surefoot.run.first_notes import notes_of
from surefoot.run.memory_shortage import record_shortage
from surefoot.run.rank_agreement import SharedFolder, SilentLog, make_health
from surefoot.run.resume_point import StartingPoint, Wanted, find_starting_point, put_aside
from surefoot.state.checkpoint import list_checkpoints, step_of
from surefoot.state.commit import Draft, put_back
from surefoot.state.manifest import Manifest
from surefoot.state.retention import DECIDING_KEY, EPHEMERAL_KEY, delete
from surefoot.state.saver import SaveKind, make_saver
from surefoot.state.shards import pieces_of

CURSOR_KEY = "cursor"
"""In `about`: where the data stands."""


@dataclass(frozen=True)
class RunResult:
    """The end of a run."""

    folder: Path | None
    """None for a run that leaves no trace."""
    status: str
    """`finished`, `stopped` or `dry-run`."""
    reason: str
    step: int
    metrics: Mapping[str, float]
    """Latest value of each metric, as SET/METRIC."""
    model: nn.Module = field(repr=False)
    """The trained module itself."""


class FolderRun:
    """An assembled run and the folder that it owns.

    Args:
        assembly: the parts.
        folder: taken by this process already.
        about: what each checkpoint says of its run: config hash, data fingerprints, model.
        observers: further observers; one that fails never stops the run.
    """

    def __init__(
        self,
        assembly: Assembly,
        folder: RunFolder | SharedFolder,
        about: Mapping[str, Any],
        observers: Sequence[Observer] = (),
    ) -> None:
        self.assembly = assembly
        self.folder = folder
        self.about = dict(about)
        self.latest = LatestMetrics()
        self._utilization = UtilizationProbe(assembly.trainable.device)
        self.metrics_log: MetricsLog | SilentLog = SilentLog()
        essential: tuple[Observer, ...] = (self.latest,)
        if not isinstance(folder, SharedFolder):
            patient = assembly.settings.checkpoint.on_full == "continue"
            self.metrics_log = MetricsLog(
                folder.metrics_path, self._utilization, self._resource_probe(), patient, self._note
            )
            event_log = EventLog(folder.events_path, patient=patient)
            essential = (self.metrics_log, event_log, self.latest)
        self.observers = Observers(essential, observers)
        assembly.trainable.log.observers = (self.observers,)
        self.watch = HangWatch(
            stacks_path(folder.artifacts_path, assembly.trainable.state.rank),
            float(assembly.settings.guard.deadline.value),
            self._note,
            self._reading,
            float(assembly.settings.loader.deadline.value),
        )
        self.spending = Spending(
            budget_of(assembly.settings.contract) if assembly.place.speaks else Budget(),
            assembly.place.ranks.size,
            folder.events_path,
            folder.metrics_path,
            self.tell,
        )
        saving = assembly.place.ranks.channel("save")
        self.saver = make_saver(assembly.settings, folder.checkpoints_path, saving, self.tell)
        self._began = self._clock()
        self._failure: BaseException | None = None
        self._from_ephemeral = False
        assembly.trainable.log.investigate = self._investigate

    def begin(self) -> None:
        """Says that the run starts from nothing."""
        notes = list(notes_of(self.assembly))
        told = {"seed": self.assembly.settings.seed, "attempt": self.folder.lease.attempt}
        self.tell(EventKind.START, "started", {**told, **self.spending.told()})
        for note in notes:
            self._note(note)

    def _reading(self) -> str:
        """Which samples are read in this process now, for training or for an evaluation."""
        loaders = (self.assembly.loader, *self.assembly.eval_loaders.values())
        return next((loader.reading for loader in loaders if loader.reading), "")

    def _resource_probe(self) -> ResourceProbe:
        trainable, place = self.assembly.trainable, self.assembly.place
        peak = None
        if trainable.device.type == "cuda":
            name = torch.cuda.get_device_name(trainable.device)
            peak = dense_peak(name, trainable.precision.name)
        return ResourceProbe(
            trainable.device,
            lambda: self._utilization.energy_joules,
            self.assembly.pace.flops_per_sample,
            None if peak is None else peak * place.ranks.size,
            self._note,
        )

    def restore(
        self,
        told: Mapping[str, object],
        check: Callable[[Manifest], None] = lambda _: None,
        wanted: Wanted | None = None,
    ) -> int:
        """Goes back to the newest whole checkpoint that fits the log, or to the one that is named.

        Args:
            told: what the resume event says besides, such as the accepted changes.
            check: refuses a checkpoint that this run cannot go on from, before anything is changed.
            wanted: which checkpoint.

        Returns:
            Its step.

        Raises:
            CheckpointError: there is none, or it is of another model.
        """
        if not isinstance(self.folder, SharedFolder):
            put_back(self.folder.checkpoints_path)
        point = self._find(wanted or Wanted())
        check(point.manifest)
        self._from_ephemeral = bool(point.manifest.about.get(EPHEMERAL_KEY, False))
        moved = self._go_back_to(point)
        aside = [path.name for path in point.newer]
        if aside and not isinstance(self.folder, SharedFolder):
            text = f"going on from {point.path.name}, put aside: {', '.join(aside)}"
            self._note(text)
            put_aside(point.newer, point.path)
        self.tell(
            EventKind.RESUME,
            f"resumed from {point.path.name}",
            {
                "checkpoint": point.path.name,
                "moved_rows": moved.name if moved else None,
                "put_aside": aside,
                "attempt": self.folder.lease.attempt,
                **self.spending.told(),
                **told,
            },
        )
        return point.manifest.step

    def _find(self, wanted: Wanted) -> StartingPoint:
        ranks = self.assembly.place.ranks
        return find_starting_point(self.folder.checkpoints_path, ranks, self.metrics_log, wanted)

    def _go_back_to(self, point: StartingPoint) -> Path | None:
        """Puts state and log back, and tells of what was refused; returns where rows were moved."""
        offsets = self.assembly.trainable.state.restore(point.snapshot)
        for error in point.refused:
            self._note(f"a newer checkpoint was refused: {error}")
        self.latest.values = dict(point.latest)
        if not point.log_misfit:
            return self.metrics_log.resume_at(offsets["metrics"])
        text = f"THE METRICS LOG BEGINS ANEW, what it held is put aside: {point.log_misfit}"
        self._note(text)
        return self.metrics_log.begin_anew()

    def train(self, stop: StopOnSignal, watched: ExitStack) -> RunResult:
        """Runs to the end, or until `stop` asks, and tells how it ended; closes `watched` before.

        Raises:
            SurefootError: what made it fail; the events hold it with its traceback.
        """
        self.spending.asked = stop
        self.spending.check()
        self._leave_when(self._checking(stop.cut_wait), self._checking(stop.cut_evaluation))
        self._began = self._clock()
        try:
            with watched, no_exit():
                outcome = self._loop(stop).run()
        except BaseException as error:
            self._record_failure(error)
            raise
        finally:
            self.assembly.close()
        return self._result(outcome)

    def close(self) -> None:
        """Closes every log and gives the folder back."""
        try:
            self.observers.close()
        except SurefootError as second:
            if self._failure is None:
                raise
            # Such as for the same full disk: the first error is the one to be told.
            self._failure.add_note(f"and this could not be written down: {second}")
        finally:
            self._utilization.close()
            self.folder.close()

    def tell(self, kind: str, message: str, data: Mapping[str, object]) -> None:
        """Records an event at the current step."""
        step = self.assembly.trainable.state.progress.step
        self.observers.on_event(Event(kind, step, message, data, time.time()))

    def _note(self, text: str) -> None:
        self.tell(EventKind.NOTE, text, {})

    def save(self, kind: SaveKind) -> bool:
        """Saves this moment, or begins to; the metrics log is on the disk before it.

        Returns:
            False where the disk refuses and the run goes on without.
        """
        self.watch.beat("a save")
        # The save before is told first: who hears of it may make room for this one.
        self.saver.finish()
        trainable, decisions = self.assembly.trainable, self.assembly.decisions
        step, cursor = trainable.state.progress.step, trainable.state.progress.cursor
        offset, trouble, free = 0, None, None
        try:
            offset = self.metrics_log.sync()
        except SurefootError as error:
            trouble, free = error, free_bytes(self.folder.path)
        snapshot = trainable.state.capture(metrics=offset)
        about = {
            **self.about,
            CURSOR_KEY: {"epoch": cursor.epoch, "position": cursor.position},
            DECIDING_KEY: decisions.decided_at(step),
            EPHEMERAL_KEY: kind is SaveKind.EPHEMERAL,
        }
        pieces = pieces_of(snapshot.tensors)
        still_owner = self.folder.lease.still_owner
        values = snapshot.values
        draft = Draft(step, pieces, values, about)
        draft = replace(draft, still_owner=still_owner, trouble=trouble, free_bytes=free)
        return self.saver.save(draft, kind)

    def _roll_back(self, roll_back: RollBack) -> None:
        """Puts everything back to the newest checkpoint before the spike, and notes what to leave.

        The checkpoint is published anew with that note; those of the updates that are undone go.

        Raises:
            CheckpointError: there is none that is old enough.
        """
        self.saver.finish()
        state, spikes = self.assembly.trainable.state, self.assembly.trainable.log.guard.spikes
        checkpoints, ranks = self.folder.checkpoints_path, self.assembly.place.ranks
        # A log that somebody has cut meanwhile is no reason to end the run.
        point = self._find(Wanted(last_step=roll_back.last_step, may_begin_log_anew=True))
        path = point.path
        with spikes.remembering(roll_back):
            moved = self._go_back_to(point)
        self.save(SaveKind.FINAL)
        if ranks.rank == 0:
            for newer in list_checkpoints(checkpoints):
                if step_of(newer) > state.progress.step:
                    delete(newer)
        self.tell(
            EventKind.ROLL_BACK,
            f"back to {path.name}, before the spike in window {roll_back.spike_window}; windows "
            f"{roll_back.left_out[0]} to {roll_back.left_out[-1]} will be left out",
            {
                "checkpoint": path.name,
                "moved_rows": moved.name if moved else None,
                **asdict(roll_back),
            },
        )

    def _evaluate(self) -> str | None:
        self.saver.poll()
        return self.assembly.evaluate()

    def _investigate(
        self, event: Event, window: Window, denominators: Mapping[str, float]
    ) -> dict[str, object]:
        """Runs a window that was not finite again, and keeps every bad one for a replay."""
        found: dict[str, object] = {}
        trainable = self.assembly.trainable
        if event.kind != EventKind.SPIKE:
            first_bad = trainable.first_bad.find(window, denominators)
            found = {"first_bad": first_bad, "meaning": described(first_bad)}
        if isinstance(self.folder, SharedFolder):
            return found
        batches = [micro_batch.data for micro_batch in window.micro_batches]
        roll_backs = [asdict(back) for back in trainable.log.guard.spikes.roll_backs]
        told = replace(event, data={**event.data, **found})
        try:
            kept = keep_batch(self.folder.artifacts_path, told, batches, {"roll_backs": roll_backs})
        except OSError as error:
            # Such as a full disk: the event itself matters more.
            return {**found, "evidence": f"not kept: {error}"}
        if kept is not None:
            found["evidence"] = str(kept.relative_to(self.folder.path))
        return found

    def _open_windows(self, cursor: Any) -> Iterator[Window]:
        trainable = self.assembly.trainable
        with closing(cast(Any, self.assembly.open_windows(cursor))) as opened:
            windows = self.spending.watching(self.watch.beating(opened, "an update"))
            if trainable.log.guard.spikes.roll_backs:
                windows = leaving_out(
                    windows,
                    trainable.state.progress.window + 1,
                    trainable.log.guard.spikes.is_left_out,
                )
            try:
                yield from windows
            except CutShort:
                # The others wait for the window that this rank will not have.
                if trainable.host_sums is not None:
                    trainable.host_sums.leave()
                raise

    def _checking(self, cut: ShouldAbort) -> ShouldAbort:
        def checked() -> bool:
            self.spending.check()
            return cut()

        return checked

    def _leave_when(self, cut_wait: ShouldAbort, cut_evaluation: ShouldAbort) -> None:
        """An evaluation or a wait for data is left where these say so."""
        assembly = self.assembly
        assembly.loader.leave_when(cut_wait)
        if assembly.place.ranks.size == 1:
            # Several ranks leave an evaluation between two batches, together.
            for loader in assembly.eval_loaders.values():
                loader.leave_when(cut_wait)
        sets = {
            name: left_when(cut_evaluation, opened, self.watch.beat)
            for name, opened in assembly.evaluator.sets.items()
        }
        self.assembly = replace(assembly, evaluator=replace(assembly.evaluator, sets=sets))

    def _loop(self, stop: StopOnSignal) -> Loop:
        assembly, settings = self.assembly, self.assembly.settings
        return Loop(
            LoopParts(
                update=assembly.trainable.update,
                log=assembly.trainable.log,
                progress=assembly.trainable.state.progress,
                open_windows=self._open_windows,
                horizon=make_horizon(settings, assembly),
                evaluate=_nothing if settings.evaluate.every == "never" else self._evaluate,
                evaluate_every=make_cadence(settings.evaluate.every, assembly),
                save=self.save,
                save_every=make_cadence(settings.checkpoint.every, assembly),
                ephemeral_every=make_cadence(settings.checkpoint.ephemeral_every, assembly),
                finish_saves=self._before_the_end,
                stop_request=stop,
                decided_before=assembly.decisions.end,
                clock=make_clock(assembly),
                roll_back=self._roll_back,
                saves_first=settings.guard.spikes == "roll-back",
                compare_ranks=make_health(assembly, self.tell).check,
                compare_ranks_every=make_cadence(settings.guard.compare_ranks_every, assembly)
                if assembly.place.ranks.size > 1
                else AtEnd(),
                from_ephemeral=self._from_ephemeral,
                slow_first_update=settings.train.compile != "off",
            )
        )

    def _clock(self) -> tuple[LedgerReading, int]:
        trainable = self.assembly.trainable
        trainable.log.ledger.switch(Phase.REST)
        trainable.log.book_times()
        return trainable.log.ledger.read(), trainable.state.progress.step

    def _before_the_end(self) -> None:
        self.saver.finish(must_succeed=True)
        self._write_time_ledger()

    def _write_time_ledger(self) -> None:
        """Says where the time of this process went, in an event and a file."""
        if isinstance(self.folder, SharedFolder):
            return
        (began, first_step), (now, last_step) = self._began, self._clock()
        seconds = now.since(began).as_json()
        stretch = {
            "attempt": self.folder.lease.attempt,
            "first_step": first_step,
            "last_step": last_step,
            "host_seconds": {name: round(value, 6) for name, value in seconds.items()},
            "device_milliseconds": self.assembly.trainable.device_milliseconds(),
        }
        add_stretch(self.folder.artifacts_path / TIME_LEDGER_NAME, stretch)
        wall = seconds.pop("wall")
        most = sorted(seconds.items(), key=lambda item: -item[1])[:3]
        shares = ", ".join(f"{value / wall:.0%} {name}" for name, value in most if wall)
        self.tell(EventKind.LEDGER, f"{wall:.1f} s of this process: {shares}", stretch)

    def _record_failure(self, error: BaseException) -> None:
        self._failure = error
        step = self.assembly.trainable.state.progress.step
        try:
            self.saver.finish()
        except SurefootError as second:
            error.add_note(f"and the save that was under way failed: {second}")
        try:
            if text := record_shortage(error, self.assembly, self.folder.artifacts_path):
                self._note(text)
            self._write_time_ledger()
            self.observers.on_event(failure_event(error, step))
            self.metrics_log.sync()
        except (SurefootError, OSError) as second:
            # Such as a full disk: the first error is the one to be told.
            error.add_note(f"and this could not be written down: {second}")

    def lent(self, stop: StopOnSignal) -> LookoutHooks:
        """What is done where another rank is lost, and the main thread may wait for ever."""

        def record(error: RankError) -> None:
            if self._failure is None:
                step = self.assembly.trainable.state.progress.step
                self.observers.on_event(failure_event(error, step))

        return LookoutHooks(self.watch.dump, record, lambda: self.watch.doing, stop.is_asked)

    def _result(self, outcome: Outcome) -> RunResult:
        return RunResult(
            folder=self.folder.path,
            status=outcome.status.value,
            reason=outcome.reason,
            step=outcome.step,
            metrics=dict(self.latest.values),
            model=self.assembly.material.model,
        )


def make_clock(assembly: Assembly) -> Callable[[], float]:
    """The clock of rank 0, as all ranks heard it last."""
    host_sums = assembly.trainable.host_sums
    return time.monotonic if host_sums is None else host_sums.clock


def _nothing() -> None:
    return None
