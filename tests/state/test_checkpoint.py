"""Checkpoints are published whole, verified before use, and never lost to a newer one."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch

from surefoot.core.errors import CheckpointError, DiskFullError
from surefoot.state import commit as module
from surefoot.state.checkpoint import (
    list_checkpoints,
    newest_whole,
    read_checkpoint,
    step_of,
    write_checkpoint,
)
from surefoot.state.host_copies import HostStage
from surefoot.state.manifest import seal
from surefoot.state.retention import Keep, Retention
from surefoot.state.shards import Box, Piece
from surefoot.state.tree import Snapshot, split_tree


def snapshot(step: int) -> Snapshot:
    state = {"model": {"w": torch.full((64, 64), float(step))}, "progress": {"step": step}}
    return split_tree({**state, "rng": {"torch": torch.arange(5, dtype=torch.uint8)}})


def save(folder: Path, step: int) -> Path:
    return write_checkpoint(folder, step, snapshot(step), {"config_hash": "x"})


def test_what_is_read_is_what_was_written(tmp_path: Path) -> None:
    manifest, back = read_checkpoint(save(tmp_path, 7))
    assert manifest.step == 7 and manifest.about["config_hash"] == "x"
    assert manifest.about["ranks"] == 1 and (tmp_path / "latest").read_text() == "step-00000007\n"
    assert back.values == snapshot(7).values
    assert torch.equal(back.tensors["model/w"], torch.full((64, 64), 7.0))
    assert back.tensors["rng/torch"].dtype == torch.uint8
    assert manifest.tensors["model/w"].shape == (64, 64)


def test_no_file_is_a_pickle(tmp_path: Path) -> None:
    names = {path.suffix for path in save(tmp_path, 1).iterdir()}
    assert names == {".json", ".safetensors"}


@pytest.mark.parametrize("name", ["model.safetensors", "rng.safetensors", "state.json"])
@pytest.mark.parametrize("damage", ["flip", "truncate", "zero", "missing", "swap", "link"])
def test_every_damage_is_found_before_use_and_falls_back(
    tmp_path: Path, name: str, damage: str
) -> None:
    older = save(tmp_path, 1)
    newer = save(tmp_path, 2)
    path = newer / name
    content = bytearray(path.read_bytes())
    if damage == "flip":
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    elif damage == "truncate":
        path.write_bytes(content[:-1])
    elif damage == "zero":
        path.write_bytes(bytes(len(content)))
    elif damage == "missing":
        path.unlink()
    elif damage == "swap":
        path.write_bytes((older / name).read_bytes() + b" " * (name == "rng.safetensors"))
    else:
        path.rename(tmp_path / "elsewhere")
        os.symlink(tmp_path / "elsewhere", path)
    folder, manifest, state, refused = newest_whole(tmp_path)
    assert folder == older and manifest.step == 1
    assert float(state.tensors["model/w"][0, 0]) == 1.0
    assert len(refused) == 1 and name in str(refused[0])


def test_a_torn_manifest_is_no_checkpoint(tmp_path: Path) -> None:
    save(tmp_path, 1)
    newer = save(tmp_path, 2)
    text = (newer / "manifest.json").read_text()
    (newer / "manifest.json").write_text(text[: len(text) // 2])
    assert newest_whole(tmp_path)[0].name == "step-00000001"


def test_a_checkpoint_whose_manifest_is_gone_is_refused_by_name(tmp_path: Path) -> None:
    save(tmp_path, 1)
    newest = save(tmp_path, 2)
    (newest / "manifest.json").unlink()
    path, _, _, refused = newest_whole(tmp_path)
    assert path.name == "step-00000001"
    assert [error.where for error in refused] == [str(newest / "manifest.json")]


@pytest.mark.parametrize("name", ["../outside", "/etc/passwd", "..", "a/b"])
def test_a_manifest_cannot_name_a_file_outside(tmp_path: Path, name: str) -> None:
    folder = save(tmp_path, 1)
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"][name] = {"size_bytes": 1, "xxh3_128": "0"}
    (folder / "manifest.json").write_text(seal(manifest))
    with pytest.raises(CheckpointError, match="outside"):
        read_checkpoint(folder)


def test_nothing_whole_is_an_error_that_lists_every_refusal(tmp_path: Path) -> None:
    for step in (1, 2):
        (save(tmp_path, step) / "state.json").unlink()
    with pytest.raises(CheckpointError) as caught:
        newest_whole(tmp_path)
    assert str(caught.value).count("state.json is missing") == 2


@pytest.mark.parametrize("call", ["write_tensors", "sync_path", "digest", "write_text", "rename"])
def test_an_error_while_writing_publishes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    older = save(tmp_path, 1)

    def fails(*args: object, **kwargs: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, call, fails)
    with pytest.raises(DiskFullError, match="No space left"):
        save(tmp_path, 2)
    assert {path.name for path in tmp_path.iterdir()} == {older.name, "latest"}
    assert (tmp_path / "latest").read_text() == f"{older.name}\n"


def test_retention_keeps_the_newest_and_clears_what_was_left(tmp_path: Path) -> None:
    for step in range(1, 6):
        save(tmp_path, step)
    (tmp_path / "step-00000009.abc.tmp").mkdir()
    Retention(tmp_path, Keep(latest=2, best=0, every_steps=0)).apply()
    assert [path.name[-1] for path in list_checkpoints(tmp_path)] == ["4", "5"]
    assert not list(tmp_path.glob("*.tmp"))


def test_writing_a_step_again_replaces_the_damaged_one(tmp_path: Path) -> None:
    folder = save(tmp_path, 3)
    (folder / "model.safetensors").write_bytes(b"torn")
    save(tmp_path, 3)
    assert newest_whole(tmp_path)[0] == folder


@pytest.mark.parametrize("staged", [False, True])
def test_a_name_that_reads_as_a_part_of_another_is_not_mistaken_for_it(
    tmp_path: Path, staged: bool
) -> None:
    rows = torch.arange(4.0)
    whole = {"m/a@0": torch.full((2,), 7.0), "m/a@0@0": torch.full((2,), 8.0)}
    whole |= {"m/a@": torch.tensor(9.0), "m/a@0,": torch.tensor(10.0)}
    pieces = [Piece("m/a", (4,), Box((at,), (2,)), rows[at : at + 2]) for at in (0, 2)]
    pieces += [Piece(n, tuple(t.shape), Box.whole(t.shape), t) for n, t in whole.items()]
    draft = module.Draft(1, HostStage().copy(pieces) if staged else pieces, {}, {})
    tensors = read_checkpoint(module.commit(tmp_path, draft))[1].tensors
    assert set(tensors) == {"m/a", *whole}
    for name, tensor in {"m/a": rows, **whole}.items():
        assert torch.equal(tensors[name], tensor)


def test_checkpoints_are_ordered_by_step_and_other_names_are_none(tmp_path: Path) -> None:
    steps = (99_999_998, 99_999_999, 100_000_000, 100_000_001)
    for step in steps:
        made = save(tmp_path, step)
    for name in ("step-²", "step-٣", "step-3", "step-000000003", "step-", "step-1e9", "step-0x"):
        shutil.copytree(made, tmp_path / name)
    assert [step_of(folder) for folder in list_checkpoints(tmp_path)] == list(steps)
    folder, manifest, _, refused = newest_whole(tmp_path)
    assert manifest.step == steps[-1] and folder == made and not refused
    Retention(tmp_path, Keep(latest=1, best=0, every_steps=0)).apply()
    assert list_checkpoints(tmp_path) == [made] and (tmp_path / "step-3").is_dir()


@pytest.mark.parametrize("what", ["a folder", "a folder for the temporary name", "a full disk"])
def test_a_checkpoint_is_published_whatever_becomes_of_latest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    older = save(tmp_path, 1)
    before = {path.name for path in tmp_path.iterdir()}
    if what == "a folder":
        (tmp_path / "latest").unlink()
        (tmp_path / "latest").mkdir()
    elif what == "a full disk":
        replace_text = module.replace_text

        def fails(path: Path, text: str) -> None:
            path.with_name("latest.tmp").touch()
            replace_text(path / "none", text)

        monkeypatch.setattr(module, "replace_text", fails)
    else:
        (tmp_path / "latest.tmp").mkdir()
        before |= {"latest.tmp"}
    made = save(tmp_path, 2)
    assert newest_whole(tmp_path)[0] == made and list_checkpoints(tmp_path) == [older, made]
    assert {path.name for path in tmp_path.iterdir()} == {*before, made.name}


@pytest.mark.parametrize("what", ["folder", "file", "link", "dangling link"])
def test_what_stands_at_the_place_of_a_checkpoint_is_replaced_and_leaves_nothing(
    tmp_path: Path, what: str
) -> None:
    elsewhere = tmp_path / "elsewhere"
    place = tmp_path / "checkpoints" / "step-00000003"
    place.parent.mkdir()
    if what == "folder":
        save(place.parent, 3)
    elif what == "file":
        place.write_text("a note")
    else:
        (elsewhere if what == "link" else tmp_path / "none").mkdir()
        place.symlink_to(elsewhere)
    made = save(place.parent, 3)
    assert newest_whole(place.parent)[0] == made == place
    assert not place.is_symlink() and elsewhere.exists() is (what == "link")
    assert {path.name for path in place.parent.iterdir()} == {place.name, "latest"}


def test_a_link_in_the_place_of_a_checkpoint_is_not_put_back_over(tmp_path: Path) -> None:
    (tmp_path / "step-00000003.abc.replaced.tmp").mkdir()
    (tmp_path / "step-00000003").symlink_to(tmp_path / "none")
    module.put_back(tmp_path)
    assert (tmp_path / "step-00000003").is_symlink()
