"""A power cut at any point of a save: what was reported is there, whole, and nothing is mixed.

A kill leaves what the operating system holds in memory; a power cut loses it. Here every call that
makes something durable is followed, and after each call two disks are built that the cut may leave:
one on which every name has arrived but only synced contents (the rest is zeros), and one on which
only what was synced has arrived, names too.
"""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from faults.saves import PROTOCOL, check, pieces
from surefoot.core.errors import SurefootError
from surefoot.parallel.ranks import OneRank
from surefoot.state import durable
from surefoot.state.commit import Draft
from surefoot.state.retention import Keep, Retention
from surefoot.state.saver import SavePolicy, Saver


class Disk:
    """What a disk holds for certain."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.contents: dict[int, bytes] = {}
        """Synced content of each file, by its number on the disk."""
        self.names: dict[int, dict[str, int]] = {os.stat(root).st_ino: {}}
        """Synced names in each folder."""
        self.reported = 0
        """Last step whose commit was reported."""
        self._held: list[int] = []

    def synced(self, path: Path) -> None:
        # Held open, its number is given to no other file after a deletion.
        self._held.append(os.open(path, os.O_RDONLY))
        found = os.fstat(self._held[-1])
        if stat.S_ISDIR(found.st_mode):
            self.names[found.st_ino] = {entry.name: entry.inode() for entry in os.scandir(path)}
        else:
            self.contents[found.st_ino] = path.read_bytes()

    def close(self) -> None:
        for descriptor in self._held:
            os.close(descriptor)

    def with_all_names(self, to: Path) -> None:
        """Every rename and name has arrived; contents that were not synced have not."""
        for path in sorted(self.root.rglob("*")):
            copy = to / path.relative_to(self.root)
            if path.is_dir():
                copy.mkdir(parents=True)
            else:
                content = path.read_bytes()
                is_synced = self.contents.get(path.stat().st_ino) == content
                copy.write_bytes(content if is_synced else bytes(len(content)))

    def with_synced_names(self, to: Path) -> None:
        """Nothing has arrived that was not synced."""
        self._build(os.stat(self.root).st_ino, to)

    def _build(self, folder: int, to: Path) -> None:
        to.mkdir(exist_ok=True)
        for name, inode in self.names.get(folder, {}).items():
            if inode in self.names:
                self._build(inode, to / name)
            elif inode in self.contents:
                (to / name).write_bytes(self.contents[inode])
            else:
                (to / name).mkdir()


@contextmanager
def followed(disk: Disk, look: Callable[[], None]) -> Iterator[None]:
    """Calls `look` after each call of the protocol."""
    real = {(module, name): getattr(module, name) for module, name in PROTOCOL}
    sync = durable.sync_path

    def syncing(path: Path) -> None:
        sync(path)
        disk.synced(path)

    looking = False

    def watched(function: Callable[..., object]) -> Callable[..., object]:
        def call(*args: object) -> object:
            nonlocal looking
            result = function(*args)
            if not looking:
                # What a resume does on the disks that were built is not followed.
                looking = True
                look()
                looking = False
            return result

        return call

    for (module, name), function in real.items():
        setattr(module, name, watched(syncing if name == "sync_path" else function))
    try:
        yield
    finally:
        for (module, name), function in real.items():
            setattr(module, name, function)


def lose_power_everywhere(tmp_path: Path, steps: list[int], keep: int = 1) -> int:
    """Saves these steps and cuts the power after each call; returns how many disks were read."""
    root = tmp_path / "run"
    root.mkdir()
    disk, count = Disk(root), 0

    def look() -> None:
        nonlocal count
        for build in (disk.with_all_names, disk.with_synced_names):
            after = tmp_path / f"after-{count}"
            after.mkdir()
            build(after)
            if disk.reported:
                check(after, disk.reported)
            shutil.rmtree(after)
            count += 1

    def tell(kind: str, message: str, data: object) -> None:
        disk.reported = int(message.split("-")[-1])
        look()

    letting_go = Retention(root, Keep(latest=keep, best=0))
    saver = Saver(root, SavePolicy("sync", "stop"), letting_go, OneRank(), tell)
    with followed(disk, look), closing(disk):
        for step in steps:
            saver.save(Draft(step, pieces(step, 0, 1), {"step": step}, {}))
    return count


def test_what_was_reported_survives_a_power_cut(tmp_path: Path) -> None:
    # Step 3 twice: the second time it takes the place of the first.
    assert lose_power_everywhere(tmp_path, [1, 2, 3, 3, 4]) > 100


@pytest.mark.parametrize("forgotten", ["file", "folder", "parent"])
def test_each_sync_is_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forgotten: str
) -> None:
    synced = Disk.synced

    def some_synced(self: Disk, path: Path) -> None:
        kind = "file" if path.is_file() else "parent" if path.name == "run" else "folder"
        if kind != forgotten:
            synced(self, path)

    monkeypatch.setattr(Disk, "synced", some_synced)
    with pytest.raises((AssertionError, SurefootError)):
        lose_power_everywhere(tmp_path, [1, 2, 3])
