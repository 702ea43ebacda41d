"""Imports weights from checkpoints of other programs, read in a sandboxed process.

The process has limits of memory and time, starts no program and writes nowhere else; pickles run
no code. Only its answer is used here.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from surefoot.core.errors import CheckpointError, MissingDataError, RequestError
from surefoot.state.foreign_reader import REPORT_NAME, WEIGHTS_NAME

MIN_TIMEOUT_SECONDS = 60
MIN_READ_BYTES_PER_SECOND = 20 << 20
"""Lower bound for the speed of a disk, used for the time limit."""


@dataclass(frozen=True)
class Imported:
    """Result of an import."""

    weights: Path
    kind: str
    tensors: int
    elements: int
    left_out: tuple[str, ...]
    notes: tuple[str, ...]
    model: dict[str, Any]
    """The model section of a recipe that fits these weights, if it is one of our models."""


def import_weights(source: Path, target: Path) -> Imported:
    """Reads foreign weights and writes them as safetensors, for `model.initial_weights`.

    Args:
        source: a `.pt` file, safetensors (one file or an index of shards), a folder of
            transformers or of torch's distributed checkpoint, a Lightning or nanoGPT checkpoint.
        target: the file to write; must not exist.

    Raises:
        MissingDataError: `source` does not exist.
        RequestError: `target` exists, or its folder does not.
        CheckpointError: `source` is damaged, hostile or of an unknown form.
    """
    if not source.exists():
        raise MissingDataError("the file or folder does not exist", where=str(source))
    if target.exists() or not target.parent.is_dir():
        raise RequestError(
            "the file already exists" if target.exists() else "its folder does not exist",
            where=str(target),
            rule="an import writes a new file",
            remedy="choose another file with --out",
        )
    beside = Path(tempfile.mkdtemp(prefix=".import-", dir=target.parent))
    try:
        report = _read_apart(source, beside)
        os.replace(beside / WEIGHTS_NAME, target)
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    return Imported(
        target,
        str(report["kind"]),
        int(report["tensors"]),
        int(report["elements"]),
        tuple(map(str, report["left_out"])),
        tuple(map(str, report["notes"])),
        dict(report["model"]),
    )


def _read_apart(source: Path, beside: Path) -> dict[str, Any]:
    size = size_of(source)
    seconds = MIN_TIMEOUT_SECONDS + size // MIN_READ_BYTES_PER_SECOND
    program = [sys.executable, "-P", "-m", "surefoot.state.foreign_reader"]
    arguments = [str(source.absolute()), str(beside.absolute()), str(size), str(seconds)]
    try:
        done = subprocess.run(
            [*program, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            cwd=beside,
            timeout=2 * seconds,
        )
    except subprocess.TimeoutExpired:
        raise _refusal(source, f"it could not be read within {2 * seconds} s") from None
    try:
        report: dict[str, Any] = json.loads((beside / REPORT_NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        last = done.stderr.decode("utf-8", "replace").strip().splitlines()[-1:]
        how = f"its reader ended with code {done.returncode}" + "".join(f": {t}" for t in last)
        raise _refusal(source, how) from None
    if "error" in report:
        raise _refusal(source, str(report["error"]))
    return report


def size_of(source: Path) -> int:
    """Bytes of a file, or of the regular files in a folder; for an index, of its folder."""
    if source.is_file() and not source.name.endswith(".index.json"):
        return source.stat().st_size
    folder = source if source.is_dir() else source.parent
    files = (p for p in folder.iterdir() if p.is_file() and not p.is_symlink())
    return sum(p.stat().st_size for p in files)


def _refusal(source: Path, what: str) -> CheckpointError:
    return CheckpointError(
        f"the checkpoint cannot be imported: {what}",
        where=str(source),
        rule="only tensors and plain values are read, no code is run, and memory is limited by the "
        "size of the files",
        remedy="save only the state dict, with safetensors.torch.save_file or torch.save",
    )
