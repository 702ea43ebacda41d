"""Checkpoints on disk: lists them and finds the newest complete one.

Tensors are in safetensors files, everything else in JSON; no pickle is written or read. A reader
verifies every digest before it changes any live object.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from surefoot.core.errors import GO_ON_FROM_OLDER, CheckpointError
from surefoot.parallel.ranks import OneRank, Ranks
from surefoot.state.commit import (
    STATE_NAME,
    Draft,
    commit,
    step_folder,
)
from surefoot.state.manifest import (
    MALFORMED,
    Manifest,
    named_step,
    read_manifest,
    verify_files,
)
from surefoot.state.reading import StoredTensors
from surefoot.state.shards import pieces_of
from surefoot.state.tree import Snapshot


def write_checkpoint(
    checkpoints: Path,
    step: int,
    snapshot: Snapshot,
    about: Mapping[str, Any],
    kind: str = "resumable",
    ranks: Ranks | None = None,
) -> Path:
    """Writes and publishes one checkpoint; returns its folder. See `commit`.

    Raises:
        CheckpointError: the disk refused; nothing was published and older ones are untouched.
    """
    with suppress(OSError):  # `commit` reports errors; parents are not created.
        checkpoints.mkdir(parents=True, exist_ok=True)
    draft = Draft(step, pieces_of(snapshot.tensors), snapshot.values, about, kind)
    return commit(checkpoints, draft, ranks)


def read_checkpoint(folder: Path) -> tuple[Manifest, Snapshot]:
    """Verifies every digest, then opens the checkpoint: tensors are read on access.

    Raises:
        CheckpointError: it is damaged, incomplete or not a checkpoint.
    """
    manifest = read_manifest(folder)
    verify_files(folder, manifest)
    try:
        if STATE_NAME not in manifest.files:
            raise ValueError(f"the manifest does not list {STATE_NAME}")
        values = json.loads((folder / STATE_NAME).read_text(encoding="utf-8"))
        tensors = StoredTensors(folder, manifest)
    except (OSError, SafetensorError, *MALFORMED) as error:
        raise CheckpointError(
            f"the checkpoint cannot be read: {error}",
            where=str(folder),
            rule="a checkpoint consists of safetensors files and one JSON state",
            remedy=GO_ON_FROM_OLDER,
        ) from error
    return manifest, Snapshot(tensors, values)


def list_checkpoints(checkpoints: Path) -> list[Path]:
    """Published checkpoints in step order, including damaged ones. Unfinished ones have other names
    and are never listed."""
    if not checkpoints.is_dir():
        return []
    steps = {path: named_step(path.name) for path in checkpoints.iterdir()}
    found = [(step, path) for path, step in steps.items() if step is not None]
    return [path for _, path in sorted(found) if path.is_dir()]


def step_of(checkpoint: Path) -> int:
    """The step in the name of a checkpoint folder."""
    step = named_step(checkpoint.name)
    if step is None:
        raise ValueError(f"{checkpoint.name} is not the name of a checkpoint")
    return step


def newest_whole(
    checkpoints: Path, ranks: Ranks | None = None, *, last_step: float = math.inf
) -> tuple[Path, Manifest, Snapshot, list[CheckpointError]]:
    """The newest checkpoint that verifies on every rank; reports what is wrong with newer ones.

    Args:
        last_step: checkpoints of later steps are ignored.

    Raises:
        CheckpointError: there is none; every refusal is listed.
    """
    ranks = ranks or OneRank()
    refused: list[CheckpointError] = []
    found = [f.name for f in reversed(list_checkpoints(checkpoints)) if step_of(f) <= last_step]
    names = ranks.gather("checkpoints", found)
    for name in names[0]:
        folder = checkpoints / name
        error: CheckpointError | None = None
        seen: dict[str, Any] = {}
        try:
            read = read_checkpoint(folder)
            seen["attempt"] = read[0].about.get("attempt")
        except CheckpointError as own:
            error = own
            seen["error"] = str(own)
        said: list[dict[str, Any]] = ranks.gather(f"verify {name}", seen)
        first = next((answer["error"] for answer in said if "error" in answer), None)
        if first is None and any(answer != said[0] for answer in said):
            first = "the ranks see different checkpoints of this name: is the folder shared?"
        if first is None:
            return folder, *read, refused
        refused.append(error or CheckpointError(first, where=f"{folder}, on another rank"))
    raise CheckpointError(
        "no complete checkpoint was found"
        + (f" at or before step {last_step:g}" if last_step < math.inf else "")
        + "".join(f"\n{error}" for error in refused),
        where=str(checkpoints),
        rule="a resume needs one published, undamaged checkpoint",
        remedy="start a new run; a resume never starts from scratch silently",
    )


__all__ = [
    "list_checkpoints",
    "newest_whole",
    "read_checkpoint",
    "step_folder",
    "step_of",
    "write_checkpoint",
]
