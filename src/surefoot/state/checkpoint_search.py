"""The checkpoints that a path means: a checkpoint, a run's, or those of a folder of checkpoints.

One answer for every command. Read-only: a reader does not own the run and restores nothing.
"""

from __future__ import annotations

from pathlib import Path

from surefoot.state.checkpoint import list_checkpoints, newest_whole, read_checkpoint
from surefoot.state.manifest import MANIFEST_NAME, Manifest
from surefoot.state.tree import Snapshot

CHECKPOINTS_NAME = "checkpoints"
"""Folder of the checkpoints in a run folder."""


def checkpoints_at(path: Path) -> list[Path]:
    """The checkpoints that `path` means, oldest first, complete or not; possibly none."""
    if (path / MANIFEST_NAME).is_file() or path in list_checkpoints(path.parent):
        return [path]
    return list_checkpoints(path / CHECKPOINTS_NAME) or list_checkpoints(path)


def read_newest(path: Path) -> tuple[Manifest, Snapshot] | None:
    """The checkpoint at `path`, or the newest complete one there; None if there are none.

    Raises:
        CheckpointError: it is damaged, or all of them are.
    """
    found = checkpoints_at(path)
    if not found:
        return None
    if found == [path]:
        return read_checkpoint(path)
    _, manifest, snapshot, _ = newest_whole(found[0].parent)
    return manifest, snapshot
