"""Durable writes and deletions: one function per operation that a disk can refuse.

Every byte of a checkpoint goes through here. Does not decide what is written or when.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from contextlib import suppress
from pathlib import Path


def sync_path(path: Path) -> None:
    """Flushes a file or folder to the disk.

    On macOS `fsync` leaves the data in the drive's cache; `F_FULLFSYNC` does not.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        full = getattr(fcntl, "F_FULLFSYNC", None)
        if full is None:
            os.fsync(descriptor)
        else:
            fcntl.fcntl(descriptor, full)
    finally:
        os.close(descriptor)


def write_text(path: Path, text: str) -> None:
    """Writes a new file durably."""
    path.write_text(text, encoding="utf-8")
    sync_path(path)


def replace_text(path: Path, text: str) -> None:
    """Replaces the content of a file atomically."""
    beside = path.with_name(f"{path.name}.tmp")
    write_text(beside, text)
    rename(beside, path)
    sync_path(path.parent)


def rename(old: Path, new: Path) -> None:
    """Renames atomically and durably."""
    os.rename(old, new)


def remove(path: Path, *, ignore_errors: bool = False) -> None:
    """Deletes a folder with its content, a file, or a link."""
    # The target of a link belongs to somebody else and is not deleted.
    if path.is_symlink() or path.is_file():
        with suppress(*([OSError] if ignore_errors else [])):
            path.unlink()
    else:
        shutil.rmtree(path, ignore_errors=ignore_errors)
