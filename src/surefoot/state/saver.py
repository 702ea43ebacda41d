"""Saves the checkpoints of one run, synchronously or in the background.

At most one save is in flight. An error in it reaches the training at its next boundary, on all
ranks. A disk that is full or fails is always reported; by policy the run continues without a
checkpoint or ends.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Literal

from surefoot.config.sections import Settings
from surefoot.core.errors import CheckpointError, DiskRefusedError
from surefoot.core.units import Steps
from surefoot.parallel.ranks import Ranks
from surefoot.state.commit import Draft, commit
from surefoot.state.host_copies import HostStage
from surefoot.state.retention import Keep, Retention

SAVE = "save"
SAVE_PAUSED = "save-paused"

Tell = Callable[[str, str, Mapping[str, object]], None]
"""Kind, message and data of an event."""


class SaveKind(Enum):
    """Why a checkpoint is written."""

    REGULAR = "regular"
    EPHEMERAL = "ephemeral"
    """Kept only until the next one."""
    FINAL = "final"
    """The run ends with it: it must succeed."""


@dataclass(frozen=True)
class SavePolicy:
    """How checkpoints are written."""

    mode: Literal["sync", "async"] = "sync"
    on_full: Literal["continue", "stop"] = "continue"


@dataclass
class _Flight:
    """A save in progress or done."""

    step: int
    must_succeed: bool
    began: float
    stalled_seconds: float = 0.0
    path: Path | None = None
    error: BaseException | None = None
    seconds: float = 0.0
    thread: threading.Thread | None = None


class Saver:
    """Writes checkpoints and applies the retention.

    Args:
        checkpoints: their folder.
        policy: synchronous or in the background; what a full disk means.
        retention: which to keep; applied by rank 0 after each commit.
        ranks: uses a channel of its own, so that no other exchange can interleave.
        tell: called for each save, on the training thread.
    """

    def __init__(
        self, checkpoints: Path, policy: SavePolicy, retention: Retention, ranks: Ranks, tell: Tell
    ) -> None:
        self._checkpoints = checkpoints
        self._policy = policy
        self._retention = retention
        self._ranks = ranks
        self._polling = ranks.channel("save-poll")
        self._tell = tell
        self._stage = HostStage()
        self._flight: _Flight | None = None

    def save(self, draft: Draft, kind: SaveKind = SaveKind.REGULAR) -> bool:
        """Saves, or starts to, once the previous save is done.

        Returns:
            False if the disk refuses and the policy is to continue.

        Raises:
            CheckpointError: this save (or, in the background, the previous one) failed; nothing was
                published, older ones are untouched.
        """
        self.finish()
        flight = _Flight(draft.step, kind is SaveKind.FINAL, time.perf_counter())
        self._flight = flight
        if self._policy.mode == "async":
            draft = replace(draft, pieces=self._stage.copy(draft.pieces))
            flight.stalled_seconds = time.perf_counter() - flight.began
            # Not a daemon: the interpreter waits for a save that has begun.
            flight.thread = threading.Thread(
                target=self._run, args=(draft, flight), name="surefoot-save"
            )
            flight.thread.start()
            if not flight.must_succeed:
                return True
        else:
            self._run(draft, flight)
            flight.stalled_seconds = flight.seconds
        return self.finish()

    def poll(self) -> None:
        """Reports a save that has ended on all ranks. Never waits for one.

        Every rank calls it at the same point of the run.

        Raises:
            CheckpointError: it failed.
        """
        flight = self._flight
        if flight is None:
            return
        is_over = flight.thread is None or not flight.thread.is_alive()
        if all(self._polling.gather("a save that has ended", is_over)):
            self.finish()

    def finish(self, *, must_succeed: bool = False) -> bool:
        """Waits for the save in flight, if any, and reports it; returns as `save` does.

        Args:
            must_succeed: a disk that refuses is an error: no later save will make up for it.

        Raises:
            CheckpointError: it failed.
        """
        flight, self._flight = self._flight, None
        if flight is None:
            return True
        if flight.thread is not None:
            flight.thread.join()
        if flight.error is None:
            assert flight.path is not None
            told = {
                "seconds": round(flight.seconds, 3),
                "stalled_seconds": round(flight.stalled_seconds, 3),
            }
            self._tell(SAVE, f"saved {flight.path.name}", told)
            return True
        must_succeed = must_succeed or flight.must_succeed or self._policy.on_full == "stop"
        if must_succeed or not isinstance(flight.error, DiskRefusedError):
            raise flight.error
        self._tell(
            SAVE_PAUSED,
            f"NO CHECKPOINT at step {flight.step}, the run continues: {flight.error}",
            {
                "checkpoint_step": flight.step,
                "folder": str(self._checkpoints),
                "needed_bytes": flight.error.needed_bytes,
                "free_bytes": flight.error.free_bytes,
            },
        )
        return False

    def _run(self, draft: Draft, flight: _Flight) -> None:
        try:
            path = commit(self._checkpoints, draft, self._ranks)
            self._let_old_ones_go(path)
            flight.path = path
        except BaseException as error:
            flight.error = error
        flight.seconds = time.perf_counter() - flight.began

    def _let_old_ones_go(self, path: Path) -> None:
        own: CheckpointError | None = None
        if self._ranks.rank == 0:
            try:
                self._retention.published(path)
                self._retention.apply()
            except CheckpointError as error:
                own = error
        said = self._ranks.gather("old checkpoints", None if own is None else str(own))[0]
        if said is not None:
            raise own or CheckpointError(said, where=f"{path.parent}, on rank 0")


def make_saver(settings: Settings, checkpoints: Path, ranks: Ranks, tell: Tell) -> Saver:
    """The saver of a run, as its settings ask."""
    section = settings.checkpoint
    every = section.keep_every
    keep = Keep(section.keep, section.keep_best, every.value if isinstance(every, Steps) else 0)
    policy = SavePolicy(section.mode, section.on_full)
    return Saver(checkpoints, policy, Retention(checkpoints, keep), ranks, tell)
