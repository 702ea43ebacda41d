"""Classifies errors of the disk, so that a run can wait until it works again.

Knows no file and no format.
"""

from __future__ import annotations

import errno
import shutil
from pathlib import Path
from typing import Final

FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
FAILING: Final = frozenset({errno.EIO, errno.EROFS, errno.ESTALE, errno.ETIMEDOUT})
"""The disk exists but fails; Linux makes one read-only after an error."""


def is_full(error: BaseException | None) -> bool:
    """Whether the disk (or a quota) is full."""
    return getattr(error, "errno", None) in FULL


def is_refused(error: BaseException | None) -> bool:
    """Whether the disk is full or fails."""
    return getattr(error, "errno", None) in FULL | FAILING


def free_bytes(folder: Path) -> int | None:
    """Free space on the disk of a folder; None if unknown."""
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return None
