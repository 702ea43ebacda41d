"""The manifest of a checkpoint: its tensors, files, sizes and digests.

Plain JSON. Reading it executes nothing and never leaves the checkpoint's folder.
"""

from __future__ import annotations

import json
import math
import mmap
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import xxhash

from surefoot.core.errors import GO_ON_FROM_OLDER, CheckpointError

MANIFEST_NAME = "manifest.json"
SCHEMA_VERSION = 2
DIGEST_KEY = "xxh3_128"
MALFORMED = (
    ValueError,
    KeyError,
    IndexError,
    TypeError,
    AttributeError,
    OverflowError,
    RecursionError,
)
"""Exceptions raised by reading plain data of an unexpected form."""


STEP_PREFIX = "step-"
STEP_DIGITS = 8


def step_name(step: int) -> str:
    """Name of the folder of the checkpoint at `step`."""
    return f"{STEP_PREFIX}{step:0{STEP_DIGITS}d}"


def named_step(name: str) -> int | None:
    """The step in a name made by `step_name`; None for any other name."""
    digits = name.removeprefix(STEP_PREFIX)
    # Other scripts have digits, too, and some that `int` does not read.
    if not (digits.isascii() and digits.isdecimal()):
        return None
    step = int(digits)
    return step if name == step_name(step) else None


@dataclass(frozen=True, slots=True)
class FileEntry:
    """One file of a checkpoint."""

    size_bytes: int
    xxh3_128: str


@dataclass(frozen=True, slots=True)
class ChunkEntry:
    """A part of a tensor: its file, its key, and its offset in the tensor."""

    file: str
    key: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor: dtype, shape, and the chunks that make it up."""

    dtype: str
    shape: tuple[int, ...]
    """Of the full tensor, however many ranks held it."""
    chunks: tuple[ChunkEntry, ...]


@dataclass(frozen=True)
class Manifest:
    """Everything that a reader needs before it reads a tensor."""

    step: int
    kind: str
    """`resumable` or `weights`."""
    files: Mapping[str, FileEntry]
    tensors: Mapping[str, TensorEntry]
    about: Mapping[str, Any]
    """Config hash, data fingerprint, versions, topology, attempt."""
    schema_version: int = SCHEMA_VERSION

    def as_json(self) -> str:
        return seal(asdict(self))


def seal(content: Mapping[str, Any]) -> str:
    """The text of a manifest with a digest of itself: the file that lists the others' digests must
    not change unnoticed either."""
    rest = {key: value for key, value in content.items() if key != DIGEST_KEY}
    text = json.dumps(rest, indent=1, sort_keys=True)
    return json.dumps(
        {**rest, DIGEST_KEY: xxhash.xxh3_128_hexdigest(text.encode())}, indent=1, sort_keys=True
    )


def _tensor_entry(raw: Any, files: Mapping[str, Any]) -> TensorEntry:
    shape = _sizes(raw["shape"])
    chunks = []
    for chunk in raw["chunks"]:
        entry = ChunkEntry(
            str(chunk["file"]), str(chunk["key"]), _sizes(chunk["offsets"]), _sizes(chunk["sizes"])
        )
        if entry.file not in files:
            raise ValueError(f"a tensor is in {entry.file!r}, which is not listed")
        if not len(entry.offsets) == len(entry.sizes) == len(shape) or any(
            offset + size > most
            for offset, size, most in zip(entry.offsets, entry.sizes, shape, strict=True)
        ):
            raise ValueError(f"the chunk {entry.key!r} is outside of its tensor")
        chunks.append(entry)
    if sum(math.prod(chunk.sizes) for chunk in chunks) != math.prod(shape):
        raise ValueError("the chunks of a tensor do not cover it once")
    return TensorEntry(str(raw["dtype"]), shape, tuple(chunks))


def _sizes(raw: Any) -> tuple[int, ...]:
    sizes = tuple(raw)
    if any(type(size) is not int or size < 0 for size in sizes):
        raise ValueError(f"sizes are whole numbers >= 0, not {sizes!r}")
    return sizes


def digest(path: Path) -> FileEntry:
    """Size and xxh3-128 of a file."""
    size = path.stat().st_size
    if size == 0:
        return FileEntry(0, xxhash.xxh3_128_hexdigest(b""))
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as view:
        return FileEntry(size, xxhash.xxh3_128_hexdigest(view))


def read_manifest(folder: Path) -> Manifest:
    """Reads a manifest and checks its form.

    Raises:
        CheckpointError: it is missing, malformed, of another schema, or names a path outside.
    """
    path = folder / MANIFEST_NAME
    try:
        if path.is_symlink():
            raise ValueError("it is not a regular file")
        text = path.read_text(encoding="utf-8")
        raw = json.loads(text)
        if text != seal(raw):
            raise ValueError("it has changed since it was written: its digest differs")
        manifest = Manifest(
            step=int(raw["step"]),
            kind=str(raw["kind"]),
            files={str(n): FileEntry(**entry) for n, entry in raw["files"].items()},
            tensors={str(n): _tensor_entry(e, raw["files"]) for n, e in raw["tensors"].items()},
            about=dict(raw["about"]),
            schema_version=int(raw["schema_version"]),
        )
    except (OSError, *MALFORMED) as error:
        raise CheckpointError(
            f"the manifest cannot be read: {error}",
            where=str(path),
            rule="a checkpoint has a complete manifest.json",
            remedy=GO_ON_FROM_OLDER,
        ) from error
    if manifest.schema_version != SCHEMA_VERSION:
        raise CheckpointError(
            f"the checkpoint has schema version {manifest.schema_version}",
            where=str(path),
            rule=f"this version reads schema {SCHEMA_VERSION}",
            remedy="use the version of surefoot that wrote it (see record.json of its run)",
        )
    if folder.name.startswith(STEP_PREFIX) and folder.name != step_name(manifest.step):
        raise CheckpointError(
            f"the manifest is for step {manifest.step}",
            where=str(path),
            rule="a checkpoint is in the folder of its step",
            remedy="use another checkpoint: this one was moved",
        )
    for name in manifest.files:
        if name in ("", ".", "..") or os.path.basename(name) != name:
            raise CheckpointError(
                f"the manifest names a file outside its folder: {name!r}",
                where=str(path),
                rule="files of a checkpoint are directly in its folder",
                remedy="do not use this checkpoint",
            )
    return manifest


def verify_files(folder: Path, manifest: Manifest) -> None:
    """Checks the size and digest of every file.

    Raises:
        CheckpointError: names the first file that is missing or differs.
    """
    for name, entry in manifest.files.items():
        path = folder / name
        try:
            if path.is_symlink() or not path.is_file():
                raise _damaged(path, "is missing or not a regular file")
            found = digest(path)
        except OSError as error:
            raise _damaged(path, f"cannot be read: {error.strerror}") from error
        if found.size_bytes != entry.size_bytes:
            raise _damaged(path, f"has {found.size_bytes} bytes, not {entry.size_bytes}")
        if found.xxh3_128 != entry.xxh3_128:
            raise _damaged(path, f"has the digest {found.xxh3_128}, not {entry.xxh3_128}")


def _damaged(path: Path, what: str) -> CheckpointError:
    return CheckpointError(
        f"{path.name} {what}",
        where=str(path),
        rule="every file of a checkpoint has the size and digest in its manifest",
        remedy=GO_ON_FROM_OLDER,
    )
