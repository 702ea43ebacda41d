"""Where a run begins: new, or resumed from a checkpoint of an earlier run.

The earlier run is read and compared, and its checkpoint chosen, before anything is built. The only
thing changed here is a checkpoint whose publication was interrupted: it is put back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from surefoot.assembly.compilation import BEFORE_THERE_WAS_A_CHOICE, Compilation
from surefoot.assembly.process import Process
from surefoot.assembly.run_parts import Assembly
from surefoot.config.building import make_schedule
from surefoot.config.load import Difference, Resolved
from surefoot.config.sections import Settings
from surefoot.core.counting import Pace
from surefoot.core.errors import RequestError
from surefoot.observe.run_folder import RunFolder, check_free_space, run_and_checkpoint
from surefoot.run.edits import edited_settings, refuse_edited_settings
from surefoot.run.folder_roles import Folder, take_folder
from surefoot.run.folder_run import FolderRun
from surefoot.run.rates import CONTINUE, RateChange, expected_change, rate_change
from surefoot.run.resume_point import StartingPoint, find_starting_point
from surefoot.run.resume_rules import (
    COMPILATION_KEY,
    Resumption,
    accept_differences,
    changes_numbers,
    refuse_crash_loop,
    resume_tier,
)
from surefoot.run.run_facts import RunDescription
from surefoot.state.commit import put_back
from surefoot.state.retention import EPHEMERAL_KEY
from surefoot.state.run_state import naming_state


@dataclass(frozen=True)
class ResumeRequest:
    """Which run to resume, and what may differ."""

    run: Path
    """A run folder, for its newest whole checkpoint; or one of its checkpoints."""
    read: Callable[[Path], Resolved[Any]]
    """Reads the configuration of a run folder."""
    accepted: tuple[str, ...] = ()
    """Fields that may differ; `data` for changed data, `metrics.jsonl` for a log that does not fit
    and is begun anew."""


class Start(Protocol):
    """How an assembled run in its folder begins."""

    from_ephemeral: bool
    """Whether it goes on from a checkpoint that only bridges the time to the next one."""

    def restore(self, run: FolderRun) -> Mapping[str, object] | None:
        """Puts the state back; what the record says of it, or None for a run from nothing."""
        ...

    def announce(self, run: FolderRun) -> None:
        """Says that the run begins, once all is written down."""
        ...


class NewStart:
    """From nothing."""

    from_ephemeral = False

    def restore(self, run: FolderRun) -> None:
        return None

    def announce(self, run: FolderRun) -> None:
        run.begin()


NEW = NewStart()


class ResumedStart:
    """From a checkpoint; the folder is taken."""

    def __init__(self, resumption: Resumption, folder: Folder, point: StartingPoint) -> None:
        self.folder = folder
        self.from_ephemeral = bool(point.manifest.about.get(EPHEMERAL_KEY, False))
        self._resumption = resumption
        self._point = point

    def begun_for(self, pace: Pace) -> int | None:
        """The horizon that the run began with, in updates; None where that was a time."""
        return self._resumption.begun_for(self._point.manifest, pace)

    @property
    def begun_with(self) -> Compilation:
        """What of the model was compiled when the run began."""
        recorded = self._point.manifest.about.get(COMPILATION_KEY)
        if not isinstance(recorded, Mapping):
            return BEFORE_THERE_WAS_A_CHOICE
        with naming_state():
            return Compilation.from_json(recorded)

    def check(self, described: RunDescription, assembly: Assembly) -> None:
        """Refuses to go on with other data, another schedule of what is done, or a full disk.

        Raises:
            SurefootError: see `Resumption.check`.
        """
        self._resumption.check(
            self._point.manifest, described.about["data"], assembly.schedule, assembly.pace
        )
        needed = described.needed_bytes(resuming=True)
        self.folder.on_owner(lambda own: check_free_space(own.path, needed))

    def restore(self, run: FolderRun) -> Mapping[str, object]:
        before, settings = self._point.manifest.about, run.assembly.settings
        is_changed = self._resumption.is_changed or before.get("data") != run.about["data"]
        tier = resume_tier(before, run.about, settings.deterministic, is_changed=is_changed)
        data = {**self._resumption.event_data(), "tier": tier.value}
        change = self._rate_change(run.assembly)
        if change is not None:
            data["rate"] = change.as_json()
        run.restore(self._point, data)
        if change is not None:
            run.journal.note(f"the learning rate changes: {change}")
        return {**data, "step": self._point.manifest.step}

    def _rate_change(self, assembly: Assembly) -> RateChange | None:
        before, pace = self._resumption.before, assembly.pace
        old = make_schedule(before, pace, self.begun_for(pace), assembly.schedule)
        now = assembly.settings, assembly.schedule
        return rate_change(self._point.manifest.step, (before, old), now)

    def announce(self, run: FolderRun) -> None:
        """The event of the restoring has said so."""


def read_resumption(asked: ResumeRequest, resolved: Resolved[Any]) -> Resumption:
    """Reads the run to go on with, and compares its configuration.

    Raises:
        RunFolderError: there is no such run, or none that has begun.
        RequestError: a difference was not accepted, or cannot be.
    """
    run, checkpoint = run_and_checkpoint(asked.run)
    before = asked.read(run)
    try:
        changes = accept_differences(before, resolved, asked.accepted)
    except RequestError as error:
        change = expected_change(run, before.settings, resolved.settings)
        if change is not None:
            error.rule += f". With these changes {change}; {CONTINUE}"
        raise
    is_changed = any(changes_numbers(change.path, resolved.recipe) for change in changes)
    return Resumption(
        before.settings, tuple(changes), asked.accepted, checkpoint, run, is_changed, before
    )


def reopen(
    resumption: Resumption, process: Process, settings: Settings, say: Callable[[str], None]
) -> ResumedStart:
    """Takes the folder of the run before and chooses the checkpoint to go on from.

    Raises:
        RunFolderError: another process has it, or resumes have led to nothing too often.
        CheckpointError: there is no checkpoint that is whole and fits the log.
    """
    ranks, run = process.place.ranks, resumption.run
    folder = take_folder(ranks, lambda: RunFolder.open(run, tell=say))
    try:
        folder.on_owner(lambda own: put_back(own.checkpoints_path))
        point = find_starting_point(folder, ranks, resumption.wanted)
        most, step = settings.guard.restarts_without_progress, point.manifest.step
        # The one rank that writes the events decides: others may see its next one already.
        folder.on_owner(lambda own: refuse_crash_loop(folder.past_events(), most, step))
        edited: list[Difference] = []
        folder.on_owner(lambda own: edited.extend(_edited(resumption, point, folder)))
        refuse_edited_settings(edited, resumption.accepted)
        if edited:
            changes = (*resumption.changes, *edited)
            resumption = replace(resumption, changes=changes, is_changed=True)
        return ResumedStart(resumption, folder, point)
    except BaseException:
        folder.close()
        raise


def _edited(resumption: Resumption, point: StartingPoint, folder: Folder) -> list[Difference]:
    """What was changed by hand in the configuration file of the run before."""
    about, written = point.manifest.about, resumption.written
    if written is None:
        return []
    return edited_settings(resumption.run, written.as_dict(), about, folder.past_events())
