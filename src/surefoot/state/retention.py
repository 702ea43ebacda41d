"""Retention of checkpoints: which ones to keep, and the deletion of the others.

Only checkpoints known to be complete count as kept; damaged ones are left in place and never
counted. Nothing is deleted before a newer one is published.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from surefoot.core.errors import CheckpointError
from surefoot.state.checkpoint import list_checkpoints, step_of
from surefoot.state.commit import TEMPORARY_SUFFIX
from surefoot.state.durable import remove, rename
from surefoot.state.manifest import STEP_PREFIX, Manifest, read_manifest, verify_files

DELETED_SUFFIX = f".deleted{TEMPORARY_SUFFIX}"
DECIDING_KEY = "deciding"
"""Key in `about`: metric, value and direction of the evaluation at the checkpoint's step."""
EPHEMERAL_KEY = "ephemeral"
"""Key in `about`: whether the checkpoint is kept only until the next one."""


@dataclass(frozen=True)
class Keep:
    """How many to keep by each rule; a checkpoint is kept if any rule says so."""

    latest: int = 3
    """Number of newest ones; at least 1."""
    best: int = 1
    """Number of best ones by the deciding metric."""
    every_steps: int = 0
    """Keep all whose step is a multiple of this; 0: none."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A published, complete checkpoint."""

    step: int
    badness: float | None = None
    """Value of the deciding metric, lower is better; None without an evaluation."""
    ephemeral: bool = False


def choose_kept(whole: Sequence[Candidate], keep: Keep) -> set[int]:
    """The steps to keep.

    Ephemeral ones are kept until anything newer is published, and count for no rule.
    """
    ordered = sorted(whole, key=lambda candidate: candidate.step)
    lasting = [candidate for candidate in ordered if not candidate.ephemeral]
    kept = {candidate.step for candidate in ordered[-1:]}
    kept |= {candidate.step for candidate in lasting[-keep.latest :]}
    judged = [candidate for candidate in lasting if candidate.badness is not None]
    judged.sort(key=lambda candidate: (candidate.badness, candidate.step))
    kept |= {candidate.step for candidate in judged[: keep.best]}
    if keep.every_steps:
        kept |= {c.step for c in lasting if c.step % keep.every_steps == 0}
    return kept


@dataclass
class Retention:
    """Deletes checkpoints that need not be kept; caches what it has verified."""

    checkpoints: Path
    keep: Keep
    _known: dict[str, Candidate | None] = field(default_factory=dict)

    def published(self, folder: Path) -> None:
        """Records a checkpoint that this process has just written, with its digests."""
        self._known[folder.name] = _candidate(read_manifest(folder))

    def apply(self) -> list[Path]:
        """Deletes what need not be kept, and stale temporary folders; returns the deleted paths.

        Raises:
            CheckpointError: one cannot be deleted; the newest ones are untouched.
        """
        found = list_checkpoints(self.checkpoints)
        whole = [c for c in map(self._look, found) if c is not None]
        kept = choose_kept(whole, self.keep)
        going = {c.step for c in whole} - kept
        gone = [folder for folder in found if step_of(folder) in going]
        for folder in gone:
            delete(folder)
            del self._known[folder.name]
        clear_left(self.checkpoints)
        return gone

    def _look(self, folder: Path) -> Candidate | None:
        if folder.name not in self._known:
            try:
                manifest = read_manifest(folder)
                verify_files(folder, manifest)
                self._known[folder.name] = _candidate(manifest)
            except CheckpointError:
                self._known[folder.name] = None
        return self._known[folder.name]


def delete(folder: Path) -> None:
    """Deletes one checkpoint; if interrupted, it still exists or is no longer a checkpoint.

    If it was moved away and replaced by a link, only the link is deleted.

    Raises:
        CheckpointError: the disk refuses.
    """
    # Renamed first, it is no longer a checkpoint; remains of a kill are cleared later.
    going = folder.with_name(f"{folder.name}{DELETED_SUFFIX}")
    remove(going, ignore_errors=True)
    try:
        rename(folder, going)
        remove(going)
    except OSError as error:
        raise CheckpointError(
            f"an old checkpoint could not be deleted: {error}",
            where=str(folder),
            rule="checkpoint.keep sets how many are kept",
            remedy="make the folder writable for this user, or keep more; then resume",
        ) from error


def clear_left(checkpoints: Path) -> None:
    """Clears remains of interrupted saves and deletions. Only for the owner, and after `put_back`
    or a save: a replaced checkpoint may be the only one.
    """
    for left in checkpoints.glob(f"{STEP_PREFIX}*{TEMPORARY_SUFFIX}"):
        remove(left, ignore_errors=True)


def _candidate(manifest: Manifest) -> Candidate:
    deciding = manifest.about.get(DECIDING_KEY)
    badness = None
    if isinstance(deciding, Mapping):
        badness = _badness(deciding)
    return Candidate(manifest.step, badness, bool(manifest.about.get(EPHEMERAL_KEY, False)))


def _badness(deciding: Mapping[str, Any]) -> float | None:
    value = deciding.get("value")
    if not isinstance(value, int | float) or value != value:
        return None
    return float(value) if deciding.get("direction") == "min" else -float(value)
