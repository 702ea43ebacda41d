"""A log that somebody deletes, replaces or cuts while the run writes it. It stands again, whole
where that can be, and nothing that stood in its place is thrown away.

A deleted file lives on behind its descriptor, so what the run wrote is still to be had.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from surefoot.observe.files.atomic import atomic_write, free_name_beside, read_from


@dataclass(frozen=True)
class RestoredLog:
    """A log that stands at its place again."""

    descriptor: int
    """Of the new file; the old one is closed."""
    size: int
    told: str
    """What has happened; empty where a faithful copy stood there, and nothing was changed."""


def restore_log_file(path: Path, descriptor: int, size: int) -> RestoredLog | None:
    """Looks whether `path` names the file behind `descriptor`, and mends it where it does not.

    Args:
        size: bytes that the run has written there.

    Returns:
        None where all is as the run left it.

    Raises:
        OSError: the disk refuses; the old descriptor holds what it held, try again later.
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
