"""One run in its folder: restore, train, save, go back, end. It chooses no part of a run.

Whatever happens, the folder says so: a failure leaves its traceback, a stop its checkpoint.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from surefoot.assembly.deciding import saves_best
from surefoot.assembly.run_parts import Assembly, MicroBatches
from surefoot.core.budget import Budget
from surefoot.core.disk import free_bytes
from surefoot.core.errors import RankError, SurefootError
from surefoot.core.interruption import CutShort, ShouldAbort, never, no_exit
from surefoot.core.reports import Observer
from surefoot.engine.interrupt import StopOnSignal
from surefoot.engine.loop import Loop, LoopParts, Outcome
from surefoot.engine.spike_guard import RollBack
from surefoot.engine.window import Window, leaving_out
from surefoot.observe.events import EventKind
from surefoot.observe.watch import HangWatch, stacks_path
from surefoot.parallel.lookout import LookoutHooks
from surefoot.run.bad_windows import BadWindows
from surefoot.run.budget_watch import Spending, budget_of
from surefoot.run.edits import CONFIG_DIGEST, METRICS_KEY
from surefoot.run.first_notes import notes_of
from surefoot.run.folder_roles import Folder, MeasuredRun
from surefoot.run.journal import Journal
from surefoot.run.memory_shortage import memory_table, record_shortage
from surefoot.run.rank_agreement import make_health
from surefoot.run.resume_point import StartingPoint, Wanted, find_starting_point, put_aside
from surefoot.run.time_account import TimeAccount
from surefoot.state.checkpoint import list_checkpoints, step_of
from surefoot.state.commit import Draft
from surefoot.state.retention import DECIDING_KEY, EPHEMERAL_KEY, delete
from surefoot.state.run_state import RunState
from surefoot.state.saver import SaveKind, make_saver
from surefoot.state.shards import pieces_of

CURSOR_KEY = "cursor"
"""In `about`: where the data stands."""

WatchBatches = Callable[[MicroBatches, Callable[[], RunState]], MicroBatches]
"""Hands micro-batches on and looks at the run between them: its second argument settles the update
in flight and returns the state."""


def unwatched(batches: MicroBatches, settled_state: Callable[[], RunState]) -> MicroBatches:
    """The micro-batches of a run that nobody looks at."""
    return batches


@dataclass(frozen=True)
class RunResult:
    """The end of a run.

    >>> RunResult(None, "dry-run", "built, ran one update", 1, {}, nn.Identity())
    RunResult(folder=None, status='dry-run', reason='built, ran one update', step=1, metrics={})
    """

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
    """An assembled run and its folder.

    Args:
        assembly: the parts.
        folder: taken by this process, or by rank 0.
        about: what each checkpoint says of its run: config hash, data fingerprints, model.
        stop: asks the ranks to stop, the same of all.
        observers: further observers; one that fails never stops the run.
        watch_batches: looks at the run between micro-batches.
        from_ephemeral: whether the checkpoint that it goes on from only bridges the time to the
            next one.
    """

    def __init__(
        self,
        assembly: Assembly,
        folder: Folder,
        about: Mapping[str, Any],
        stop: StopOnSignal,
        observers: Sequence[Observer] = (),
        watch_batches: WatchBatches = unwatched,
        from_ephemeral: bool = False,
    ) -> None:
        trainable, place, settings = assembly.trainable, assembly.place, assembly.settings
        self.assembly = assembly
        self.folder = folder
        self.about = about
        self.state = trainable.state
        self._stop = stop
        self._watch_batches = watch_batches
        self._from_ephemeral = from_ephemeral
        self.journal = Journal(
            folder,
            MeasuredRun(
                trainable.device,
                trainable.precision.name,
                place.ranks.size,
                assembly.pace.flops_per_sample,
            ),
            trainable.state.progress,
            observers,
            patient=settings.checkpoint.on_full == "continue",
        )
        self.spending = Spending(
            budget_of(settings.contract) if place.owns_folder else Budget(),
            place.ranks.size,
            folder.past_events(),
            folder.last_seen(),
            self.journal.tell,
            stop,
        )
        self.update = assembly.make_update(
            (self.journal.observers,),
            BadWindows(trainable.first_bad, trainable.optimizing.guard, folder),
        )
        self.log = self.update.parts.log
        self.saver = make_saver(
            settings, folder.checkpoints_path, place.ranks.channel("save"), self.journal.tell
        )
        self.watch = HangWatch(
            stacks_path(folder.artifacts_path, place.ranks.rank),
            float(settings.guard.deadline.value),
            self.journal.note,
            self._reading,
            float(settings.loader.deadline.value),
        )
        self._failure: BaseException | None = None
        self._weightless: set[str] = set()

    # -- the beginning -------------------------------------------------------------------------

    def begin(self) -> None:
        """Says that the run starts from nothing."""
        notes = list(notes_of(self.assembly))
        data = {
            "seed": self.assembly.settings.seed,
            "attempt": self.folder.attempt,
            CONFIG_DIGEST: self.about.get(CONFIG_DIGEST),
        }
        self.journal.tell(EventKind.START, "started", {**data, **self.spending.event_data()})
        for note in notes:
            self.journal.note(note)

    def _reading(self) -> str:
        """Which samples are read in this process now, for training or for an evaluation."""
        loaders = (self.assembly.loader, *self.assembly.eval_loaders.values())
        return next((loader.reading for loader in loaders if loader.reading), "")

    def restore(self, point: StartingPoint, event_data: Mapping[str, object]) -> None:
        """Goes back to a checkpoint.

        Args:
            point: the checkpoint, and what becomes of newer ones.
            event_data: what the resume event says besides, such as the accepted changes.

        Raises:
            CheckpointError: it is of another model.
        """
        moved = self._go_back_to(point)
        aside = [path.name for path in point.newer]
        if aside:
            self.journal.note(f"going on from {point.path.name}, put aside: {', '.join(aside)}")
            self.folder.on_owner(lambda own: put_aside(point.newer, point.path))
        self.journal.tell(
            EventKind.RESUME,
            f"resumed from {point.path.name}",
            {
                "checkpoint": point.path.name,
                "moved_rows": moved.name if moved else None,
                "put_aside": aside,
                "attempt": self.folder.attempt,
                CONFIG_DIGEST: self.about.get(CONFIG_DIGEST),
                **self.spending.event_data(),
                **event_data,
            },
        )

    def _go_back_to(self, point: StartingPoint) -> Path | None:
        """Puts state and log back, and tells of what was refused; returns where rows were moved."""
        offsets = self.state.restore(point.take_snapshot())
        for error in point.refused:
            self.journal.note(f"a newer checkpoint was refused: {error}")
        self.journal.latest.values = dict(point.latest)
        if not point.log_misfit:
            return self.journal.logs.resume_at(offsets["metrics"])
        self.journal.note(
            f"THE METRICS LOG BEGINS ANEW, what it held is put aside: {point.log_misfit}"
        )
        return self.journal.logs.begin_anew()

    def memory_table(self) -> dict[str, int]:
        """Bytes on this rank of weights, gradients, optimizer state and average, for the record."""
        return memory_table(self.assembly)

    # -- the training --------------------------------------------------------------------------

    def train(self, watched: ExitStack) -> RunResult:
        """Runs to the end, or to a stop, and tells how it ended; closes `watched` before.

        Raises:
            SurefootError: what made it fail; the events hold it with its traceback.
        """
        self.spending.check()
        account = TimeAccount(self.assembly, self.log)
        try:
            with watched, no_exit():
                outcome = self._loop(account).run()
        except BaseException as error:
            self._record_failure(error, account)
            raise
        finally:
            self.assembly.close()
        return self._result(outcome)

    def _loop(self, account: TimeAccount) -> Loop:
        assembly, settings, due = self.assembly, self.assembly.settings, self.assembly.cadences
        host_sums = assembly.trainable.passing.ranks.host_sums

        def finish_saves() -> None:
            self.saver.finish(must_succeed=True)
            account.write(self.folder, self.journal)

        return Loop(
            LoopParts(
                update=self.update,
                log=self.log,
                progress=self.state.progress,
                open_windows=self._open_windows,
                horizon=due.horizon,
                evaluate=_nothing if settings.evaluate.every == "never" else self._evaluate,
                evaluate_every=due.evaluate_every,
                save=self.save,
                save_every=due.save_every,
                is_best=assembly.decisions.best_at if saves_best(settings) else never_best,
                ephemeral_every=due.ephemeral_every,
                finish_saves=finish_saves,
                stop_request=self._stop,
                decided_before=assembly.decisions.end,
                # The clock of rank 0, as all ranks heard it last.
                clock=time.monotonic if host_sums is None else host_sums.clock,
                roll_back=self._roll_back,
                saves_first=settings.guard.spikes == "roll-back",
                compare_ranks=make_health(assembly, self.log.ledger, self.journal.note).check,
                compare_ranks_every=due.compare_ranks_every,
                from_ephemeral=self._from_ephemeral,
                slow_first_update=settings.train.compile != "off",
            )
        )

    def _open_windows(self, cursor: Any) -> Iterator[Window]:
        opened = self.assembly.open_windows(cursor, self._cut_wait, self._watched)
        with closing(opened):
            windows = self.spending.watching(self.watch.beating(opened, "an update"))
            spikes = self.assembly.trainable.optimizing.guard.spikes
            if spikes.roll_backs:
                windows = leaving_out(windows, self.state.progress.window + 1, spikes.is_left_out)
            try:
                yield from windows
            except CutShort:
                # The others wait for the window that this rank will not have.
                if (host_sums := self.assembly.trainable.passing.ranks.host_sums) is not None:
                    host_sums.leave()
                raise

    def _watched(self, batches: MicroBatches) -> MicroBatches:
        return self._watch_batches(batches, self._settled_state)

    def _settled_state(self) -> RunState:
        self.log.settle()
        return self.state

    def _evaluate(self) -> str | None:
        """Evaluates every set, tells the observers, decides; returns a reason to finish."""
        self.saver.poll()
        if not self.assembly.eval_loaders:
            return None
        # Several ranks leave an evaluation between two batches, together.
        should_abort: ShouldAbort = self._cut_wait if self.assembly.place.ranks.size == 1 else never
        step = self.state.progress.step
        reports = self.assembly.evaluator.run(step, should_abort, self._before_eval_batch)
        for report in reports:
            self.journal.observers.on_eval(report)
            if not report.weight and report.name not in self._weightless:
                self._weightless.add(report.name)
                self.journal.note(
                    f"the validation set {report.name} is empty: none of its {report.samples} "
                    "samples carries any weight, its metrics are NaN and decide nothing. Are all "
                    "of its targets left out (-100), or masked?"
                )
        return self.assembly.decisions(step, reports, self.log.tell)

    def _before_eval_batch(self) -> None:
        self.spending.check()
        if self._stop.cut_evaluation():
            raise CutShort
        self.watch.beat("an evaluation")

    def _cut_wait(self) -> bool:
        self.spending.check()
        return self._stop.cut_wait()

    # -- saving and going back -----------------------------------------------------------------

    def save(self, kind: SaveKind) -> bool:
        """Saves this moment, or begins to; the metrics log is on the disk before it.

        Returns:
            False where the disk refuses and the run goes on without.
        """
        self.watch.beat("a save")
        # The save before is told first: who hears of it may make room for this one.
        self.saver.finish()
        step, cursor = self.state.progress.step, self.state.progress.cursor
        offset, digest, trouble, free = 0, "", None, None
        try:
            offset = self.journal.logs.sync()
            digest = self.journal.logs.digest()
        except SurefootError as error:
            trouble, free = error, free_bytes(self.folder.path)
        snapshot = self.state.capture(metrics=offset)
        about = {
            **self.about,
            METRICS_KEY: digest,
            CURSOR_KEY: {"epoch": cursor.epoch, "position": cursor.position},
            DECIDING_KEY: self.assembly.decisions.decided_at(step),
            EPHEMERAL_KEY: kind is SaveKind.EPHEMERAL,
        }
        draft = Draft(
            step,
            pieces_of(snapshot.tensors),
            snapshot.values,
            about,
            still_owner=self.folder.still_owner,
            trouble=trouble,
            free_bytes=free,
        )
        return self.saver.save(draft, kind)

    def _roll_back(self, roll_back: RollBack) -> None:
        """Puts everything back to the newest checkpoint before the spike, and notes what to leave.

        The checkpoint is published anew with that note; those of the updates that are undone go.

        Raises:
            CheckpointError: there is none that is old enough.
        """
        self.saver.finish()
        # The rows are on the disk when the place of a checkpoint in them is looked for.
        self.journal.logs.sync()
        # A log that somebody has cut meanwhile is no reason to end the run.
        wanted = Wanted(last_step=roll_back.last_step, may_begin_log_anew=True)
        point = find_starting_point(self.folder, self.assembly.place.ranks, wanted)
        with self.assembly.trainable.optimizing.guard.spikes.remembering(roll_back):
            moved = self._go_back_to(point)
        self.save(SaveKind.FINAL)
        self.folder.on_owner(lambda own: self._delete_undone())
        self.journal.tell(
            EventKind.ROLL_BACK,
            f"back to {point.path.name}, before the spike in window {roll_back.spike_window}; "
            f"windows {roll_back.left_out[0]} to {roll_back.left_out[-1]} will be left out",
            {
                "checkpoint": point.path.name,
                "moved_rows": moved.name if moved else None,
                **asdict(roll_back),
            },
        )

    def _delete_undone(self) -> None:
        for path in list_checkpoints(self.folder.checkpoints_path):
            if step_of(path) > self.state.progress.step:
                delete(path)

    # -- the end -------------------------------------------------------------------------------

    def close(self) -> None:
        """Closes every log and gives the folder back."""
        try:
            self.journal.close()
        except SurefootError as second:
            if self._failure is None:
                raise
            # Such as for the same full disk: the first error is the one to be told.
            self._failure.add_note(f"and this could not be written down: {second}")
        finally:
            self.folder.close()

    def lookout_hooks(self) -> LookoutHooks:
        """What is done where another rank is lost, and the main thread may wait for ever."""

        def record(error: RankError) -> None:
            if self._failure is None:
                self.journal.failure(error)

        return LookoutHooks(self.watch.dump, record, lambda: self.watch.doing, self._stop.is_asked)

    def _record_failure(self, error: BaseException, account: TimeAccount) -> None:
        self._failure = error
        try:
            self.saver.finish()
        except SurefootError as second:
            error.add_note(f"and the save that was under way failed: {second}")
        try:
            if text := record_shortage(error, self.assembly, self.folder.artifacts_path):
                self.journal.note(text)
            account.write(self.folder, self.journal)
            self.journal.failure(error)
            self.journal.logs.sync()
        except (SurefootError, OSError) as second:
            # Such as a full disk: the first error is the one to be told.
            error.add_note(f"and this could not be written down: {second}")

    def _result(self, outcome: Outcome) -> RunResult:
        return RunResult(
            folder=self.folder.path,
            status=outcome.status.value,
            reason=outcome.reason,
            step=outcome.step,
            metrics=dict(self.journal.latest.values),
            model=self.assembly.material.model,
        )


def never_best(step: int) -> bool:
    """No evaluation is saved for its metric."""
    return False


def _nothing() -> None:
    return None
