"""`surefoot checkpoint inspect | verify` on whole, damaged, incomplete and missing checkpoints."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from faults.runs_for_faults import edit_json, fit
from surefoot.cli import main as command
from surefoot.core.errors import EXIT_DONE, EXIT_FOUND, EXIT_REQUEST
from surefoot.state.checkpoint import write_checkpoint
from surefoot.state.completeness import PARTS
from surefoot.state.manifest import digest
from surefoot.state.tree import split_tree

Capture = pytest.CaptureFixture[str]
WEIGHT = torch.arange(12.0).reshape(3, 4)


def write(run: Path, step: int) -> Path:
    state = {
        "model": {"layer.weight": WEIGHT, "layer.bias": torch.zeros(3)},
        "optimizer": {"m": torch.zeros(3, 4, dtype=torch.bfloat16)},
        "progress": {"step": step, "epoch": 2, "cursor": {"epoch": 2, "position": 7}},
    }
    return write_checkpoint(run / "checkpoints", step, split_tree(state), {"recipe": "[tiny]"})


@pytest.fixture
def run(tmp_path: Path) -> Path:
    write(tmp_path / "run", 5)
    write(tmp_path / "run", 10)
    return tmp_path / "run"


def inspect(path: Path, *options: str) -> int:
    return command.invoke(["checkpoint", "inspect", str(path), *options])


def facts_of(path: Path, capsys: Capture, *options: str) -> dict[str, Any]:
    inspect(path, "--json", "-", *options)
    answer: dict[str, Any] = json.loads(capsys.readouterr().out)
    return answer


def test_a_run_folder_means_its_newest_checkpoint(run: Path, capsys: Capture) -> None:
    assert inspect(run) == EXIT_DONE
    out = capsys.readouterr().out
    assert "step 10, resumable" in out
    assert "epoch: 2" in out
    assert 'cursor: {"epoch": 2, "position": 7}' in out
    assert "recipe: [tiny]" in out
    assert "complete: 3 files" in out
    assert f"surefoot train --resume {run}" in out
    assert "layer.weight" not in out


def test_the_facts_as_json(run: Path, capsys: Capture) -> None:
    answer = facts_of(run, capsys)
    assert answer["step"] == 10
    assert answer["whole"] is True
    assert answer["parts"] == {
        "model": {"tensors": 2, "elements": 15, "size_bytes": 60},
        "optimizer": {"tensors": 1, "elements": 12, "size_bytes": 24},
    }
    assert answer["tensors"] == {}
    listed = facts_of(run, capsys, "--tensors")["tensors"]
    assert listed["model/layer.weight"]["shape"] == [3, 4]


def test_one_checkpoint_by_its_own_path(run: Path, capsys: Capture) -> None:
    assert facts_of(run / "checkpoints" / "step-00000005", capsys)["step"] == 5


def test_the_folder_of_checkpoints_means_the_newest(run: Path, capsys: Capture) -> None:
    assert facts_of(run / "checkpoints", capsys)["step"] == 10


def test_a_changed_byte_is_found(run: Path, capsys: Capture) -> None:
    path = run / "checkpoints" / "step-00000010" / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    assert inspect(run, "--json", "-") == EXIT_FOUND
    captured = capsys.readouterr()
    answer = json.loads(captured.out)
    assert answer["whole"] is False
    assert "model.safetensors has the digest" in answer["damage"]
    assert "damaged: model.safetensors" in captured.err


def test_a_missing_file_is_found(run: Path) -> None:
    (run / "checkpoints" / "step-00000010" / "state.json").unlink()
    assert inspect(run) == EXIT_FOUND


DAMAGE: dict[str, Callable[[Path], object]] = {
    "no manifest": lambda folder: (folder / "manifest.json").write_text(""),
    "half a manifest": lambda folder: os.truncate(folder / "manifest.json", 200),
    "another digest": lambda folder: _changed_text(folder, '"step": 10', '"step": 11'),
    "another step": lambda folder: edit_json(folder / "manifest.json", _with(step=11)),
    "another schema": lambda folder: edit_json(folder / "manifest.json", _with(schema_version=9)),
    "odd number type": lambda folder: edit_json(folder / "manifest.json", _with_dtype("float7")),
    "no number type": lambda folder: edit_json(folder / "manifest.json", _with_dtype("randn")),
    "no progress": lambda folder: _with_state(folder, {"model": {}}),
    "odd progress": lambda folder: _with_state(folder, {"progress": 3}),
    "no state at all": lambda folder: _with_state(folder, []),
}


def _changed_text(folder: Path, old: str, new: str) -> None:
    path = folder / "manifest.json"
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))


def _with(**fields: object) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda manifest: {**manifest, **fields}


def _with_dtype(dtype: str) -> Callable[[dict[str, Any]], None]:
    return lambda manifest: manifest["tensors"]["model/layer.weight"].update(dtype=dtype)


def _with_state(folder: Path, state: object) -> None:
    (folder / "state.json").write_text(json.dumps(state))
    entry = asdict(digest(folder / "state.json"))
    edit_json(folder / "manifest.json", lambda m: m["files"].update({"state.json": entry}))


@pytest.mark.parametrize("name", DAMAGE)
def test_any_damage_is_found_and_told(name: str, run: Path, capsys: Capture) -> None:
    DAMAGE[name](run / "checkpoints" / "step-00000010")
    assert inspect(run, "--tensors") == EXIT_FOUND
    out = capsys.readouterr().out
    assert "damaged: " in out and "surefoot train --resume" in out
    answer = facts_of(run, capsys)
    assert answer["whole"] is False and answer["damage"]
    assert command.invoke(["checkpoint", "verify", str(run)]) == EXIT_FOUND


@pytest.mark.parametrize(
    ("name", "what"),
    [("nowhere", "the folder does not exist"), (".", "no checkpoint was found")],
)
def test_where_there_is_none_it_says_so(
    name: str, what: str, tmp_path: Path, capsys: Capture
) -> None:
    assert inspect(tmp_path / name) == EXIT_REQUEST
    err = capsys.readouterr().err
    assert what in err
    assert "surefoot runs" in err


def test_a_checkpoint_without_its_manifest_is_damaged(run: Path, capsys: Capture) -> None:
    for folder in (run / "checkpoints").glob("step-*"):
        (folder / "manifest.json").unlink()
    assert inspect(run) == EXIT_FOUND


@pytest.fixture
def trained(tmp_path: Path) -> Path:
    """A run with checkpoints at steps 3 and 6."""
    folder = fit(tmp_path / "runs").folder
    assert folder is not None
    return folder


def verify(path: Path, capsys: Capture) -> tuple[int, list[str]]:
    code = command.invoke(["checkpoint", "verify", str(path), "--json", "-"])
    answer = json.loads(capsys.readouterr().out)
    return code, [checkpoint["verdict"] for checkpoint in answer["checkpoints"]]


def test_what_a_run_has_saved_is_whole_and_complete(trained: Path, capsys: Capture) -> None:
    assert verify(trained, capsys) == (EXIT_DONE, ["whole", "whole"])
    newest = trained / "checkpoints" / "step-00000006"
    assert verify(newest, capsys) == (EXIT_DONE, ["whole"])
    assert verify(trained / "checkpoints", capsys)[0] == EXIT_DONE
    cursor = json.loads((newest / "manifest.json").read_text())["about"]["cursor"]
    assert cursor == {"epoch": 1, "position": 4}


def test_every_damaged_checkpoint_is_named(trained: Path, capsys: Capture) -> None:
    (trained / "checkpoints" / "step-00000003" / "model.safetensors").unlink()
    code, verdicts = verify(trained, capsys)
    assert code == EXIT_FOUND and verdicts[1] == "whole"
    assert verdicts[0].startswith("damaged: model.safetensors")
    assert command.invoke(["checkpoint", "verify", str(trained)]) == EXIT_FOUND
    assert "resume from step-00000006" in capsys.readouterr().out


@pytest.mark.parametrize("part", [*PARTS, "log_offsets", "ranks"])
def test_a_missing_part_is_named(trained: Path, capsys: Capture, part: str) -> None:
    newest = trained / "checkpoints" / "step-00000006"
    edit_json(newest / "state.json", lambda state: {k: v for k, v in state.items() if k != part})
    entry = asdict(digest(newest / "state.json"))
    edit_json(newest / "manifest.json", lambda m: m["files"].update({"state.json": entry}))
    code, verdicts = verify(trained, capsys)
    assert code == EXIT_FOUND and verdicts[0] == "whole"
    assert verdicts[1].startswith("incomplete: missing")
    assert ("random state of rank 0" if part == "ranks" else part) in verdicts[1]
