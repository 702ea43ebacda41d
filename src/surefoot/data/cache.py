"""The cache of prepared data.

An entry is named by the hash of its inputs, written to a temporary folder and published by a
rename. It contains no pickle and never changes; deleting the cache costs time, not results.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Callable
from pathlib import Path

from surefoot.core.errors import DataError


def default_cache_dir() -> Path:
    """`surefoot` in the user's cache folder: `$XDG_CACHE_HOME`, or `~/.cache`."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    # The specification says to ignore a relative path.
    root = Path(base) if base and Path(base).is_absolute() else Path.home() / ".cache"
    return root / "surefoot"


def cached_folder(cache_dir: Path, name: str, build: Callable[[Path], None]) -> Path:
    """The entry `name`, built if missing.

    Args:
        cache_dir: the cache.
        name: contains the hash of everything that the content depends on.
        build: fills an empty folder; called at most once by this process.

    Raises:
        DataError: the cache cannot be written.
    """
    final = cache_dir / name
    if final.is_dir():
        return final
    beside = cache_dir / f".{name}.{os.getpid()}.{secrets.token_hex(4)}"
    try:
        beside.mkdir(parents=True)
        build(beside)
        for path in sorted(beside.iterdir()):
            _sync(path)
        _sync(beside)
        try:
            beside.rename(final)
        except OSError:
            # Another process has published the same entry; the content is the same.
            if not final.is_dir():
                raise
        _sync(cache_dir)
    except OSError as error:
        raise DataError(
            f"prepared data could not be written to the cache: {error.strerror or error}",
            where=str(cache_dir),
            rule="the cache folder is writable and has free space",
            remedy="free space, or set XDG_CACHE_HOME to another folder",
        ) from error
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    return final


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
