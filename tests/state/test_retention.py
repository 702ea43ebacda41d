"""Which checkpoints stay: by each rule, and only those that are whole count."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from surefoot.core.errors import CheckpointError
from surefoot.state import retention
from surefoot.state.checkpoint import list_checkpoints, write_checkpoint
from surefoot.state.retention import (
    DECIDING_KEY,
    EPHEMERAL_KEY,
    Candidate,
    Keep,
    Retention,
    choose_kept,
    delete,
)
from surefoot.state.tree import split_tree


def some(*steps: int, **fields: Any) -> list[Candidate]:
    return [Candidate(step, **fields) for step in steps]


def test_the_newest_stay() -> None:
    assert choose_kept(some(1, 5, 3, 2, 4), Keep(latest=2, best=1)) == {4, 5}


def test_the_best_stay_and_of_equals_the_older() -> None:
    judged = [Candidate(s, badness=b) for s, b in [(1, 0.5), (2, 0.2), (3, 0.2), (4, 0.9)]]
    assert choose_kept(judged, Keep(latest=1, best=1)) == {2, 4}
    assert choose_kept(judged, Keep(latest=1, best=2)) == {2, 3, 4}
    assert choose_kept(judged, Keep(latest=1, best=3)) == {1, 2, 3, 4}


def test_multiples_stay_for_ever() -> None:
    assert choose_kept(some(*range(1, 10)), Keep(latest=1, best=0, every_steps=3)) == {3, 6, 9}


def test_an_ephemeral_one_stays_until_the_next_and_counts_for_nothing() -> None:
    lasting, bridge = some(10, 20), Candidate(25, badness=0.0, ephemeral=True)
    keep = Keep(latest=2, best=1, every_steps=5)
    assert choose_kept([*lasting, bridge], keep) == {10, 20, 25}
    assert choose_kept([*lasting, bridge, Candidate(27, ephemeral=True)], keep) == {10, 20, 27}
    assert choose_kept([*lasting, bridge, Candidate(30)], keep) == {10, 20, 30}


candidates = st.lists(
    st.builds(
        Candidate,
        st.integers(1, 200),
        st.none() | st.floats(allow_nan=False),
        st.booleans(),
    ),
    min_size=1,
    unique_by=lambda candidate: candidate.step,
)
keeps = st.builds(Keep, st.integers(1, 5), st.integers(0, 5), st.integers(0, 30))


@given(candidates, keeps)
def test_a_chain_of_choices_keeps_what_one_choice_would(whole: list[Candidate], keep: Keep) -> None:
    whole.sort(key=lambda candidate: candidate.step)
    there: list[Candidate] = []
    for candidate in whole:
        there.append(candidate)
        kept = choose_kept(there, keep)
        lasting = [c.step for c in there if not c.ephemeral]
        assert candidate.step in kept, "the newest always stays"
        assert set(lasting[-keep.latest :]) <= kept
        there = [c for c in there if c.step in kept]
    # Letting go at each save loses nothing that a choice among all would have kept.
    assert {c.step for c in there} == choose_kept(whole, keep)


def save(folder: Path, step: int, **about: Any) -> Path:
    state = split_tree({"model": {"w": torch.full((4,), float(step))}})
    return write_checkpoint(folder, step, state, about)


def steps(folder: Path) -> list[int]:
    return [int(path.name[-3:]) for path in list_checkpoints(folder)]


def judged(value: float, direction: str = "min") -> dict[str, Any]:
    return {DECIDING_KEY: {"metric": "loss", "value": value, "direction": direction}}


@pytest.mark.parametrize(("direction", "best"), [("min", 2), ("max", 3)])
def test_the_metric_and_its_direction_are_read_from_the_manifest(
    tmp_path: Path, direction: str, best: int
) -> None:
    for step, value in enumerate([0.5, 0.1, 0.9, float("nan"), 0.4], start=1):
        save(tmp_path, step, **(judged(value, direction) if value == value else {}))
    Retention(tmp_path, Keep(latest=1, best=1)).apply()
    assert steps(tmp_path) == [best, 5]


def test_a_damaged_one_is_neither_counted_nor_deleted(tmp_path: Path) -> None:
    for step in range(1, 5):
        save(tmp_path, step)
    for step in (3, 4):
        (tmp_path / f"step-{step:08d}" / "model.safetensors").write_bytes(b"torn")
    gone = Retention(tmp_path, Keep(latest=1, best=0)).apply()
    assert [path.name[-1] for path in gone] == ["1"], "2 is the newest that is whole"
    assert steps(tmp_path) == [2, 3, 4]


def test_an_ephemeral_one_goes_with_the_next_save(tmp_path: Path) -> None:
    letting_go = Retention(tmp_path, Keep(latest=1, best=0))
    for step, ephemeral in [(1, False), (2, True), (3, True), (4, False)]:
        letting_go.published(save(tmp_path, step, **{EPHEMERAL_KEY: ephemeral}))
        letting_go.apply()
        assert steps(tmp_path) == {1: [1], 2: [1, 2], 3: [1, 3], 4: [4]}[step]


def test_what_this_process_has_published_is_not_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    letting_go = Retention(tmp_path, Keep(latest=3, best=0))
    letting_go.published(save(tmp_path, 1))
    monkeypatch.setattr("surefoot.state.retention.verify_files", pytest.fail)
    letting_go.apply()


def test_a_deletion_that_is_cut_short_leaves_a_checkpoint_or_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (1, 2):
        save(tmp_path, step)

    def refuse(*args: object) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(retention, "rename", refuse)
        with pytest.raises(CheckpointError, match="could not be deleted"):
            delete(tmp_path / "step-00000001")
        assert steps(tmp_path) == [1, 2]
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", lambda path, ignore_errors=False: ignore_errors or refuse())
        with pytest.raises(CheckpointError, match="could not be deleted"):
            delete(tmp_path / "step-00000001")
    assert steps(tmp_path) == [2] and len(list(tmp_path.glob("*.tmp"))) == 1
    Retention(tmp_path, Keep()).apply()
    assert not list(tmp_path.glob("*.tmp"))


def test_of_a_checkpoint_that_was_moved_away_only_the_link_goes(tmp_path: Path) -> None:
    checkpoints, large_disk = tmp_path / "checkpoints", tmp_path / "large-disk"
    checkpoints.mkdir()
    for step in (1, 2, 3):
        save(checkpoints, step)
    moved = checkpoints / "step-00000001"
    moved.rename(large_disk)
    moved.symlink_to(large_disk)
    # And what an earlier attempt may have left: a link, a file where a folder is expected.
    (checkpoints / "step-00000001.deleted.tmp").symlink_to(large_disk)
    (checkpoints / "step-00000002.abc.tmp").write_text("a file")
    Retention(checkpoints, Keep(latest=2, best=0)).apply()
    assert steps(checkpoints) == [2, 3]
    assert not list(checkpoints.glob("*.tmp")) and not moved.is_symlink()
    assert (large_disk / "manifest.json").is_file(), "where the link pointed to is not ours"
