"""A checkpoint from anywhere: read as data, refused with words, never executed."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import surefoot
from faults.runs_for_faults import edit_json, fit
from surefoot.assembly.material import refuse_other_than_modules
from surefoot.core.errors import CheckpointError, RequestError, SurefootError
from surefoot.state import retention
from surefoot.state.checkpoint import read_checkpoint
from surefoot.state.manifest import digest, seal
from surefoot.state.retention import Keep, Retention

DEEP = "[" * 100_000 + "]" * 100_000


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = fit(tmp_path_factory.mktemp("runs"), checkpoint={"every": "6 steps"}).folder
    assert folder is not None
    return folder


@pytest.fixture
def copy(run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(run, tmp_path / "run"))


def newest(folder: Path) -> Path:
    return max((folder / "checkpoints").iterdir())


def rehash(checkpoint: Path) -> None:
    """Gives every file the digest that it has, as somebody who forges one would."""
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    for name in manifest["files"]:
        path = checkpoint / name
        if path.is_file():
            found = digest(path)
            manifest["files"][name] = {"size_bytes": found.size_bytes, "xxh3_128": found.xxh3_128}
    (checkpoint / "manifest.json").write_text(seal(manifest))


def resume(folder: Path) -> None:
    fit(folder.parent, resume=folder, train={"horizon": "9 steps"})


def put(*path: str, value: Any) -> Callable[[Any], None]:
    def change(tree: Any) -> None:
        for name in path[:-1]:
            tree = tree[name]
        tree[path[-1]] = value

    return change


@pytest.mark.parametrize(
    "text", [DEEP, '{"step": ' + "9" * 5000 + "}", "[1]", "{", "\x00", ""], ids=range(6)
)
@pytest.mark.parametrize("name", ["manifest.json", "state.json"])
def test_a_file_of_another_form_is_a_damaged_checkpoint(copy: Path, name: str, text: str) -> None:
    (newest(copy) / name).write_text(text)
    if name == "state.json":
        rehash(newest(copy))
    for use in (resume, lambda folder: surefoot.load(folder, model=nn.Linear(3, 1))):
        with pytest.raises(CheckpointError):
            use(copy)


@pytest.mark.parametrize(
    "change",
    [
        put("step", value=float("inf")),
        put("files", "a" * 5000, value={"size_bytes": 1, "xxh3_128": ""}),
        put("files", "../x", value={"size_bytes": 1, "xxh3_128": ""}),
        put("files", value={}),
        put("about", value={}),
        put("about", "data", value=[1]),
    ],
    ids=["infinite", "long name", "outside", "no files", "no data", "data list"],
)
def test_a_manifest_of_another_form_is_refused(copy: Path, change: Callable[[Any], None]) -> None:
    edit_json(newest(copy) / "manifest.json", change)
    with pytest.raises(CheckpointError):
        resume(copy)


def test_a_manifest_that_is_a_link_is_refused(copy: Path) -> None:
    manifest = newest(copy) / "manifest.json"
    os.rename(manifest, newest(copy) / "other.json")
    manifest.symlink_to(newest(copy) / "other.json")
    with pytest.raises(CheckpointError, match="not a regular file"):
        resume(copy)


@pytest.mark.parametrize(
    "part",
    ["progress", "model", "optimizer", "loss_scale", "average", "guard", "best", "ranks"],
)
def test_a_state_without_a_part_is_refused(copy: Path, part: str) -> None:
    edit_json(newest(copy) / "state.json", lambda tree: {k: tree[k] for k in tree if k != part})
    rehash(newest(copy))
    with pytest.raises(CheckpointError, match="unexpected form"):
        resume(copy)


@pytest.mark.parametrize(
    "change",
    [
        put("progress", "step", value="x"),
        put("progress", "step", value=-5),
        put("progress", "cursor_kind", value="Path"),
        put("log_offsets", "metrics", value="a"),
        put("model", "weight", value={"$tensor": [1]}),
        put("best", "value", value={"$float": "abc"}),
    ],
    ids=["step text", "step below 0", "cursor", "offset", "tensor", "float"],
)
def test_a_state_with_an_odd_value_is_refused(copy: Path, change: Callable[[Any], None]) -> None:
    edit_json(newest(copy) / "state.json", change)
    rehash(newest(copy))
    with pytest.raises(CheckpointError):
        resume(copy)


@pytest.mark.parametrize(
    "data", [b"", (2**62).to_bytes(8, "little") + b"{}"], ids=["empty", "huge"]
)
def test_tensors_that_cannot_be_read_are_refused(copy: Path, data: bytes) -> None:
    (newest(copy) / "model.safetensors").write_bytes(data)
    rehash(newest(copy))
    with pytest.raises(CheckpointError, match="cannot be read"):
        resume(copy)


def test_a_forged_newest_checkpoint_gives_way_to_an_older_one(tmp_path: Path) -> None:
    folder = fit(tmp_path).folder
    assert folder is not None
    (newest(folder) / "state.json").write_text(DEEP)
    rehash(newest(folder))
    loaded = surefoot.load(folder, model=nn.Linear(3, 1))
    assert loaded.step == 3


def make_module() -> nn.Module:
    return nn.Linear(3, 1)


def make_anything():  # type: ignore[no-untyped-def]
    raise AssertionError("was called")


def test_loading_calls_nothing_that_is_no_module(copy: Path, tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    hostile = {"kind": "custom", "target": "os:mkdir", "arguments": {"path": str(trace)}}
    edit_json(newest(copy) / "manifest.json", put("about", "architecture", value=hostile))
    with pytest.raises(RequestError, match="not declared to be a module"):
        surefoot.load(copy)
    assert not trace.exists()


@pytest.mark.parametrize("target", ["torch.nn:Linear", f"{__name__}:make_module"])
def test_modules_and_functions_that_declare_one_may_be_named(
    target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(
        __import__("sys").modules,
        __name__,
        __import__("types").SimpleNamespace(make_module=make_module),
    )
    refuse_other_than_modules({"kind": "custom", "target": target, "arguments": {}})


def test_an_architecture_of_another_form_is_refused(copy: Path) -> None:
    edit_json(newest(copy) / "manifest.json", put("about", "architecture", value=["gpt"]))
    with pytest.raises(SurefootError):
        surefoot.load(copy)


def test_an_old_checkpoint_that_cannot_be_deleted_is_named(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = tmp_path / "checkpoints"
    for step in (1, 2):
        folder = checkpoints / f"step-{step:08d}"
        shutil.copytree(newest(run), folder)
        manifest = json.loads((folder / "manifest.json").read_text())
        (folder / "manifest.json").write_text(seal(manifest | {"step": step}))

    def refuse(old: Path, new: Path) -> None:
        raise PermissionError(13, "Permission denied")

    # A deletion begins by taking the name of a checkpoint away.
    monkeypatch.setattr(retention, "rename", refuse)
    with pytest.raises(CheckpointError, match="could not be deleted") as caught:
        Retention(checkpoints, Keep(latest=1, best=0)).apply()
    assert caught.value.where == str(checkpoints / "step-00000001")
    for step in (1, 2):
        assert read_checkpoint(checkpoints / f"step-{step:08d}")[0].step == step
