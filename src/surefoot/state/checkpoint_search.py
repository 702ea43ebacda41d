"""Which checkpoints a path means: one by itself, a run's, or those of a folder of checkpoints.

One answer for every verb. Looks only: a reader is not the owner, and puts nothing back.
"""

from __future__ import annotations

from pathlib import Path

from surefoot.state.checkpoint import list_checkpoints, newest_whole, read_checkpoint
from surefoot.state.manifest import MANIFEST_NAME, Manifest
from surefoot.state.tree import Snapshot

CHECKPOINTS_NAME = "checkpoints"
"""In a run folder: where its checkpoints are."""


def checkpoints_at(path: Path) -> list[Path]:
    """The checkpoints that `path` means, oldest first, whole or not; none where it means none."""
    if (path / MANIFEST_NAME).is_file() or path in list_checkpoints(path.parent):
        return [path]
    return list_checkpoints(path / CHECKPOINTS_NAME) or list_checkpoints(path)


def read_newest(path: Path) -> tuple[Manifest, Snapshot] | None:
    """The checkpoint at `path`, or the newest whole one of those there; None where there are none.

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
