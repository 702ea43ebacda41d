"""Hostile checkpoints of other programs: none runs, none leaves its folder, none takes memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from faults.hostile_corpus import CANARY, GOOD, corpus, saved
from faults.reading import read_apart
from surefoot.core.errors import CheckpointError
from surefoot.state.foreign import import_weights, size_of
from surefoot.verify.processes import child

CORPUS = corpus()
SPARE_BYTES = 128 << 20
"""For what a reader needs whatever it reads."""


def outcome(source: Path, out: Path) -> tuple[dict[str, Any], int]:
    """What the reader said (an empty dict if it was ended), and the memory that it took."""
    size = size_of(source)
    with child(read_apart, str(source), str(out), size) as process:
        process.join(60)
        assert process.exitcode is not None, "hangs"
    report = out / "report.json"
    told = json.loads(report.read_text()) if report.exists() else {}
    peak = out / "peak"
    return told, int(peak.read_text()) if peak.exists() else 0


def everything(folder: Path) -> dict[str, tuple[int, int]]:
    """All files below a folder, with size and time of change."""
    found = {}
    for path in sorted(folder.rglob("*")):
        seen = path.lstat()
        found[str(path.relative_to(folder))] = (seen.st_size, seen.st_mtime_ns)
    return found


def test_the_corpus_is_large_enough() -> None:
    assert len(CORPUS) >= 60


@pytest.mark.parametrize("name", list(CORPUS))
def test_nothing_hostile_gets_in(name: str, tmp_path: Path) -> None:
    folder, out = tmp_path / "given", tmp_path / "out"
    (folder / "precious").mkdir(parents=True)
    (folder / "precious" / "file").write_text("keep")
    (folder / "evil.py").write_text(f"open({str(folder / CANARY)!r}, 'w')")
    out.mkdir()
    source = CORPUS[name](folder)
    before = everything(folder)
    told, peak = outcome(source, out)
    assert "error" in told or not told, f"was let in: {told}"
    assert not (out / "weights.safetensors").exists()
    assert everything(folder) == before and not (folder / CANARY).exists()
    assert {path.name for path in tmp_path.iterdir()} == {"given", "out"}
    assert peak <= 2 * size_of(source) + SPARE_BYTES, f"took {peak:,} bytes"


def test_a_good_file_gets_in(tmp_path: Path) -> None:
    told, _ = outcome(saved(tmp_path / "good.pt", GOOD), tmp_path)
    assert told["tensors"] == len(GOOD)
    assert load_file(tmp_path / "weights.safetensors").keys() == GOOD.keys()


@pytest.mark.parametrize("name", ["gadget os.system", "memo bomb", "inflated storage"])
def test_the_refusal_reaches_the_user(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "given"
    folder.mkdir()
    source = CORPUS[name](folder)
    with pytest.raises(CheckpointError, match="cannot be imported") as caught:
        import_weights(source, tmp_path / "out.safetensors")
    assert "no code is run" in caught.value.rule
    assert {path.name for path in tmp_path.iterdir()} == {"given"}
    assert not (folder / CANARY).exists()
