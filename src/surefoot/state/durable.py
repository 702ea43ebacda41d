"""Writes that survive a power cut, and deletions; one call for each thing that a disk can refuse.

Every byte of a checkpoint goes through here. Nothing here decides what is written or when.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from contextlib import suppress
from pathlib import Path


def sync_path(path: Path) -> None:
    """Makes what the file or folder holds durable.

    On macOS `fsync` leaves the data in the drive's own memory; `F_FULLFSYNC` does not.
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
    """Writes a new file and makes it durable."""
    path.write_text(text, encoding="utf-8")
    sync_path(path)


def replace_text(path: Path, text: str) -> None:
    """Puts a whole new content in the place of the old one."""
    beside = path.with_name(f"{path.name}.tmp")
    write_text(beside, text)
    rename(beside, path)
    sync_path(path.parent)


def rename(old: Path, new: Path) -> None:
    """One step that either has happened or has not."""
    os.rename(old, new)


def remove(path: Path, *, ignore_errors: bool = False) -> None:
    """Deletes a folder with what is in it, a file, or a link."""
    # Where a link points to was chosen by somebody else, and is not ours to empty.
    if path.is_symlink() or path.is_file():
        with suppress(*([OSError] if ignore_errors else [])):
            path.unlink()
    else:
        shutil.rmtree(path, ignore_errors=ignore_errors)
