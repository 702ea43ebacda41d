"""Writes small files atomically: a reader sees the old content or the new one, never a part.

Holds no file open and knows nothing of the content.
"""

from __future__ import annotations

import os
from pathlib import Path


def fsync_directory(path: Path) -> None:
    """Makes renames and new names inside `path` survive a power failure."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_all(descriptor: int, data: bytes) -> int:
    """Writes all of `data` and returns its length.

    Raises:
        PartialWriteError: failed after some bytes were written, such as on a full disk.
        OSError: nothing was written.
    """
    written = 0
    view = memoryview(data)
    while written < len(data):
        try:
            written += os.write(descriptor, view[written:])
        except OSError as error:
            if written == 0:
                raise
            raise PartialWriteError(written, error) from error
    return written


def read_from(descriptor: int, offset: int) -> bytes:
    """The content of a file from `offset` on."""
    chunks = []
    while chunk := os.pread(descriptor, 1 << 20, offset):
        chunks.append(chunk)
        offset += len(chunk)
    return b"".join(chunks)


def free_name_beside(path: Path, word: str) -> Path:
    """The first unused path of `STEM.WORD-1.SUFFIX`, `STEM.WORD-2.SUFFIX`, ..."""
    count = 1
    while (free := path.with_name(f"{path.stem}.{word}-{count}{path.suffix}")).exists():
        count += 1
    return free


class PartialWriteError(OSError):
    """A write stopped part way; `written` bytes are in the file."""

    def __init__(self, written: int, cause: OSError) -> None:
        super().__init__(cause.errno, cause.strerror)
        self.written = written


def atomic_write(path: Path, data: str | bytes) -> None:
    """Writes `data` (text as UTF-8) to `path`: temporary file, fsync, rename, fsync of the folder.

    A kill at any moment leaves the old file or the new one, and at worst a `.NAME.tmp-PID` next to
    it.
    """
    content = data.encode("utf-8") if isinstance(data, str) else data
    temporary = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    try:
        try:
            write_all(descriptor, content)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    fsync_directory(path.parent)


def remove_leftovers(folder: Path) -> list[Path]:
    """Removes temporary files of killed writers from `folder`; returns the removed paths.

    Only safe for the process that owns the folder.
    """
    leftovers = sorted(folder.glob(".*.tmp-*"))
    for path in leftovers:
        path.unlink(missing_ok=True)
    return leftovers
