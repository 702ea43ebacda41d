"""Restores a log that was deleted, replaced or truncated while the run writes it.

A deleted file is still readable through its descriptor. Whatever took its place is moved aside,
never deleted.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from surefoot.observe.files.atomic import atomic_write, free_name_beside, read_from


@dataclass(frozen=True)
class RestoredLog:
    """A log that is back in its place."""

    descriptor: int
    """Descriptor of the new file; the old one is closed."""
    size: int
    told: str
    """What happened; empty if a faithful copy was found and nothing was changed."""


def restore_log_file(path: Path, descriptor: int, size: int) -> RestoredLog | None:
    """Checks whether `path` is the file behind `descriptor`, and restores it if not.

    Args:
        size: bytes that the run has written to it.

    Returns:
        None if the file is unchanged.

    Raises:
        OSError: the disk refuses; the old descriptor stays valid, try again later.
    """
    own = os.fstat(descriptor)
    try:
        there = os.stat(path)
    except FileNotFoundError:
        there = None
    is_own = there is not None and os.path.samestat(own, there)
    if is_own and own.st_size == size:
        return None
    is_whole = own.st_size >= size
    content = read_from(descriptor, 0)[:size] if is_whole else b""
    told = ""
    if there is None or is_own or path.read_bytes() != content:
        what = "DELETED" if there is None else "CHANGED" if is_own else "REPLACED"
        told = f"{path.name} WAS {what} while the run wrote it"
        if there is not None:
            aside = free_name_beside(path, "changed")
            os.rename(path, aside)
            told += f"; what stood there is put aside as {aside.name}"
        told += "; all is written anew" if is_whole else "; it begins anew"
        atomic_write(path, content)
    flags = os.O_RDWR | os.O_APPEND | os.O_CLOEXEC
    stands = RestoredLog(os.open(path, flags), len(content), told)
    os.close(descriptor)
    return stands
