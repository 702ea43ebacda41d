"""Which errors come from the disk itself, so that a run may wait for it to be well again.

Knows no file and no format.
"""

from __future__ import annotations

import errno
import shutil
from pathlib import Path
from typing import Final

FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
FAILING: Final = frozenset({errno.EIO, errno.EROFS, errno.ESTALE, errno.ETIMEDOUT})
"""Of a disk that is there and does not serve; Linux makes one read-only after an error."""


def is_full(error: BaseException | None) -> bool:
    """Whether the disk (or a quota) has no room for what was written."""
    return getattr(error, "errno", None) in FULL


def is_refused(error: BaseException | None) -> bool:
    """Whether the disk is full or fails."""
    return getattr(error, "errno", None) in FULL | FAILING


def free_bytes(folder: Path) -> int | None:
    """What is free on the disk of a folder at this moment; None where the disk does not say."""
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return None
