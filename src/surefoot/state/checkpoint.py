"""Checkpoints on disk: written beside, fsynced, hashed, and published by one rename.

Tensors lie in safetensors files, everything else in JSON; no pickle is written or read. A reader
verifies every digest before anything live is touched. This module never deletes a checkpoint
before a newer one is published.
"""

from __future__ import annotations

import json
import os
import shutil
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from surefoot.core.errors import CheckpointError
from surefoot.state.manifest import (
    MALFORMED,
    MANIFEST_NAME,
    FileEntry,
    Manifest,
    TensorEntry,
    digest,
    read_manifest,
    verify_files,
)
from surefoot.state.tree import KEY_SEPARATOR, Snapshot

STATE_NAME = "state.json"
STEP_PREFIX = "step-"
STEP_DIGITS = 8
TENSOR_SUFFIX = ".safetensors"
TEMPORARY_SUFFIX = ".tmp"


def step_folder(checkpoints: Path, step: int) -> Path:
    """The folder of the checkpoint at `step`."""
    return checkpoints / f"{STEP_PREFIX}{step:0{STEP_DIGITS}d}"


def write_checkpoint(
    checkpoints: Path,
    step: int,
    snapshot: Snapshot,
    about: Mapping[str, Any],
    kind: str = "resumable",
) -> Path:
    """Writes and publishes one checkpoint; returns its folder.

    A reader sees the whole checkpoint or none of it: until the rename it lies under another name.

    Raises:
        CheckpointError: the disk refused; nothing was published and the rest is untouched.
    """
    target = step_folder(checkpoints, step)
    beside = checkpoints / f"{target.name}.{uuid.uuid4().hex[:12]}{TEMPORARY_SUFFIX}"
    try:
        beside.mkdir(parents=True)
        tensors = _write_tensors(beside, snapshot.tensors)
        _write_text(beside / STATE_NAME, json.dumps(snapshot.values, allow_nan=False))
        files = {path.name: digest(path) for path in sorted(beside.iterdir())}
        manifest = Manifest(step, kind, files, tensors, about)
        _write_text(beside / MANIFEST_NAME, manifest.as_json())
        _fsync(beside)
        _publish(beside, target)
        _fsync(checkpoints)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(beside, ignore_errors=True)
        raise CheckpointError(
            f"the checkpoint at step {step} could not be written: {error}",
            where=str(checkpoints),
            rule="a checkpoint is published whole or not at all; older ones are untouched",
            remedy="free some space or choose another place, then resume",
        ) from error
    return target


def read_checkpoint(folder: Path) -> tuple[Manifest, Snapshot]:
    """Verifies every digest, then reads the checkpoint into CPU memory.

    Raises:
        CheckpointError: it is damaged, incomplete or not a checkpoint.
    """
    manifest = read_manifest(folder)
    verify_files(folder, manifest)
    tensors: dict[str, Tensor] = {}
    try:
        if STATE_NAME not in manifest.files:
            raise ValueError(f"the manifest does not list {STATE_NAME}")
        values = json.loads((folder / STATE_NAME).read_text(encoding="utf-8"))
        for name in manifest.files:
            if name.endswith(TENSOR_SUFFIX):
                with safe_open(folder / name, framework="pt", device="cpu") as file:
                    tensors.update({k: file.get_tensor(k) for k in file.keys()})  # noqa: SIM118
    except (OSError, SafetensorError, *MALFORMED) as error:
        raise CheckpointError(
            f"the checkpoint cannot be read: {error}",
            where=str(folder),
            rule="a checkpoint holds safetensors files and one JSON state",
            remedy="resume from an older checkpoint",
        ) from error
    return manifest, Snapshot(tensors, values)


def list_checkpoints(checkpoints: Path) -> list[Path]:
    """Published checkpoints, oldest first. Unfinished ones are never listed."""
    if not checkpoints.is_dir():
        return []
    return sorted(
        path
        for path in checkpoints.iterdir()
        if path.name.startswith(STEP_PREFIX)
        and path.name[len(STEP_PREFIX) :].isdigit()
        and (path / MANIFEST_NAME).is_file()
    )


def newest_whole(checkpoints: Path) -> tuple[Path, Manifest, Snapshot, list[CheckpointError]]:
    """The newest checkpoint that verifies, and what was wrong with the newer ones.

    Raises:
        CheckpointError: there is none; every refusal is listed.
    """
    refused: list[CheckpointError] = []
    for folder in reversed(list_checkpoints(checkpoints)):
        try:
            return folder, *read_checkpoint(folder), refused
        except CheckpointError as error:
            refused.append(error)
    raise CheckpointError(
        "no whole checkpoint was found" + "".join(f"\n{error}" for error in refused),
        where=str(checkpoints),
        rule="a resume needs one published, undamaged checkpoint",
        remedy="start the run anew; nothing is started from scratch in silence",
    )


def keep_newest(
    checkpoints: Path, keep: int, also_keep: frozenset[int] = frozenset()
) -> list[Path]:
    """Deletes all but the newest `keep` published checkpoints and the steps in `also_keep`.

    Called after a newer one is published. Left-over temporary folders go too. Returns what went.

    Raises:
        CheckpointError: one cannot be deleted; the newest ones are untouched.
    """
    gone = []
    for folder in list_checkpoints(checkpoints)[:-keep]:
        if int(folder.name[len(STEP_PREFIX) :]) not in also_keep:
            _delete(folder)
            gone.append(folder)
    for folder in checkpoints.glob(f"{STEP_PREFIX}*{TEMPORARY_SUFFIX}"):
        shutil.rmtree(folder, ignore_errors=True)
    return gone


def _delete(folder: Path) -> None:
    try:
        # Without its manifest it is no checkpoint any more, whenever the deletion is cut short.
        (folder / MANIFEST_NAME).unlink()
        shutil.rmtree(folder)
    except OSError as error:
        raise CheckpointError(
            f"an old checkpoint could not be deleted: {error}",
            where=str(folder),
            rule="checkpoint.keep says how many stay",
            remedy="let this user delete in the folder, or keep more; then resume",
        ) from error


def _write_tensors(folder: Path, tensors: Mapping[str, Tensor]) -> dict[str, TensorEntry]:
    """One file for each top-level part of the state."""
    parts: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        part = name.split(KEY_SEPARATOR, 1)[0]
        parts.setdefault(part, {})[name] = tensor.detach().cpu().contiguous()
    entries: dict[str, TensorEntry] = {}
    for part, named in parts.items():
        path = folder / f"{part}{TENSOR_SUFFIX}"
        save_file(_unshared(named), path)
        os.chmod(path, 0o644)
        _fsync(path)
        for name, tensor in named.items():
            dtype = str(tensor.dtype).removeprefix("torch.")
            entries[name] = TensorEntry(path.name, dtype, tuple(tensor.shape))
    return entries


def _unshared(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies tensors that are views into one storage; safetensors refuses those."""
    seen: set[int] = set()
    unshared = {}
    for name, tensor in tensors.items():
        storage = tensor.untyped_storage().data_ptr()
        unshared[name] = tensor.clone() if storage in seen else tensor
        seen.add(storage)
    return unshared


def _publish(beside: Path, target: Path) -> None:
    if target.exists():
        # A damaged checkpoint of the same step, from before a fall-back: moved aside, not mixed.
        os.rename(
            target, target.with_name(f"{target.name}.{uuid.uuid4().hex[:12]}{TEMPORARY_SUFFIX}")
        )
    os.rename(beside, target)


def _write_text(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


__all__ = [
    "FileEntry",
    "keep_newest",
    "list_checkpoints",
    "newest_whole",
    "read_checkpoint",
    "step_folder",
    "write_checkpoint",
]
