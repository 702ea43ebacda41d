"""Any damage to a checkpoint is found before it is used, and an older one is taken instead."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from faults.saves import Acknowledged, Trial, check, start, wait
from surefoot.core.errors import CheckpointError
from surefoot.state.checkpoint import list_checkpoints, newest_whole, read_checkpoint

PAGE_BYTES = 4096
FEW, STATED = 60, 1000


@pytest.fixture(scope="module", params=[1, 2], ids=["one rank", "two ranks"])
def whole(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints at steps 1 and 2."""
    folder = tmp_path_factory.mktemp("whole")
    trial = Trial(ranks=request.param, steps=2)
    assert wait(start(folder, trial, Acknowledged())) == [0] * request.param
    return folder


def flip(path: Path, chance: random.Random) -> None:
    content = bytearray(path.read_bytes())
    content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    path.write_bytes(content)


def zero_page(path: Path, chance: random.Random) -> None:
    content = bytearray(path.read_bytes())
    begin = chance.randrange(max(1, len(content) // PAGE_BYTES)) * PAGE_BYTES
    length = min(PAGE_BYTES, len(content) - begin)
    content[begin : begin + length] = bytes(length)
    path.write_bytes(content)


def truncate(path: Path, chance: random.Random) -> None:
    os.truncate(path, chance.randrange(path.stat().st_size))


def append(path: Path, chance: random.Random) -> None:
    path.write_bytes(path.read_bytes() + chance.randbytes(chance.randint(1, 9)))


def remove(path: Path, chance: random.Random) -> None:
    path.unlink()


def take_from_the_older(path: Path, chance: random.Random) -> None:
    """A file of the checkpoint before, such as a copy that was cut short leaves behind."""
    shutil.copyfile(path.parent.with_name("step-00000001") / path.name, path)


def take_from_another(path: Path, chance: random.Random) -> None:
    """Two files of one checkpoint change places."""
    others = [other for other in path.parent.iterdir() if other.name != path.name]
    content, other = path.read_bytes(), chance.choice(others)
    path.write_bytes(other.read_bytes())
    other.write_bytes(content)


KINDS = (flip, zero_page, truncate, append, remove, take_from_the_older, take_from_another)


@pytest.mark.faults_full
def test_every_random_damage_is_found(
    whole: Path, tmp_path: Path, num_trials: Callable[[int, int], int]
) -> None:
    chance = random.Random(str(whole.name))
    found = 0
    for number in range(num_trials(FEW, STATED)):
        folder = shutil.copytree(whole, tmp_path / str(number))
        newest = list_checkpoints(folder)[-1]
        before = {path.name: path.read_bytes() for path in newest.iterdir()}
        path = chance.choice(sorted(newest.iterdir()))
        kind = KINDS[number % len(KINDS)]
        kind(path, chance)
        after = {path.name: path.read_bytes() for path in newest.iterdir()}
        if after != before:
            found += 1
            with pytest.raises(CheckpointError):
                read_checkpoint(newest)
            assert newest_whole(folder)[0].name == "step-00000001", (kind.__name__, path.name)
        shutil.rmtree(folder)
    assert found > 0.9 * num_trials(FEW, STATED)


@pytest.mark.parametrize("content", ["step-00000001\n", "step-00000009\n", "../..\n", "", "\0"])
def test_a_stale_pointer_to_the_latest_is_not_believed(
    whole: Path, tmp_path: Path, content: str
) -> None:
    folder = shutil.copytree(whole, tmp_path / "run")
    (folder / "latest").write_text(content)
    assert check(folder, 2) == 2


def test_a_checkpoint_in_the_folder_of_another_step_is_refused(whole: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(whole, tmp_path / "run")
    (folder / "step-00000002").rename(folder / "step-00000007")
    with pytest.raises(CheckpointError, match="the manifest is for step 2"):
        read_checkpoint(folder / "step-00000007")
    assert newest_whole(folder)[0].name == "step-00000001"
