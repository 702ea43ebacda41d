"""Exports a run's weights: safetensors, a transformers folder, or a plain state dict.

Writes tensors and JSON only. Values are not changed.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file
from torch import Tensor

from surefoot.core.errors import CheckpointError, MissingDataError, RequestError
from surefoot.models.gpt import GPTConfig
from surefoot.state.checkpoint_search import read_newest
from surefoot.state.gpt_names import to_transformers
from surefoot.state.manifest import Manifest
from surefoot.state.run_state import averaged_weights_of, weights_of
from surefoot.state.tree import Snapshot

ExportFormat = Literal["transformers", "safetensors", "pt"]
ExportedWeights = Literal["raw", "ema"]
SUMS_NAME = "SHA256SUMS"


@dataclass(frozen=True)
class Exported:
    """Result of an export."""

    folder: Path
    format: ExportFormat
    step: int
    files: tuple[str, ...]
    tensors: int
    weights: ExportedWeights
    note: str = ""


def export_weights(
    source: Path,
    folder: Path,
    wanted: ExportFormat | None = None,
    *,
    which: ExportedWeights = "raw",
) -> Exported:
    """Writes the weights of a run or checkpoint into a new folder.

    Args:
        source: a checkpoint, or a run folder or folder of checkpoints (the newest complete one).
        wanted: None: `transformers` if the model has a counterpart there, else `safetensors`.
        which: the trained weights, or their moving average if the run kept one.

    Raises:
        MissingDataError: there is no checkpoint at `source`.
        CheckpointError: it is damaged.
        RequestError: the folder exists, the model has no counterpart in transformers, or there is
            no average.
    """
    manifest, snapshot = _read(source)
    state = averaged_weights_of(snapshot) if which == "ema" else weights_of(snapshot)
    weights = _separate(state)
    # Extra states of modules, in any form.
    others = {name: value for name, value in state.items() if name not in weights}
    architecture = manifest.about.get("architecture")
    twin = None
    if wanted in (None, "transformers"):
        config = _gpt_config(architecture)
        twin = None if config is None else to_transformers(config, weights)
        if twin is None and wanted == "transformers":
            kind = architecture.get("kind") if isinstance(architecture, Mapping) else "own"
            raise RequestError(
                f"transformers has no model that computes the same (kind: {kind})",
                where=str(source),
                rule="a GPT of kind `layernorm, gelu, learned` is a GPT-2, one of kind `rmsnorm, "
                "swiglu, rope` a Llama; other kinds have no counterpart",
                remedy="export with --format safetensors",
            )
    if folder.exists():
        raise RequestError(
            "the folder already exists",
            where=str(folder),
            rule="an export creates a new folder",
            remedy="choose another folder with --out",
        )
    folder.mkdir(parents=True)
    note = ""
    try:
        if twin is not None:
            chosen: ExportFormat = "transformers"
            fields_of_config = {**twin.config, "dtype": _dtype(twin.tensors)}
            _write_json(folder / "config.json", fields_of_config)
            _save(twin.tensors, folder / "model.safetensors")
            note = "the tokenizer is not part of a checkpoint: see the run's artifacts"
        elif wanted == "pt":
            chosen = "pt"
            torch.save({**state, **weights}, folder / "model.pt")
        else:
            chosen = "safetensors"
            _save(weights, folder / "model.safetensors")
            if wanted is None:
                note = "transformers has no model that computes the same"
            if others:
                left = f"extra state that is not a tensor was left out: {', '.join(sorted(others))}"
                note = "; ".join(filter(None, (note, left)))
        sums = {path.name: _sha256(path) for path in sorted(folder.iterdir())}
        lines = "".join(f"{digest}  {name}\n" for name, digest in sums.items())
        (folder / SUMS_NAME).write_text(lines, encoding="utf-8")
    except BaseException as error:
        shutil.rmtree(folder, ignore_errors=True)
        if not isinstance(error, OSError):
            raise
        raise CheckpointError(
            f"the export could not be written: {error.strerror or error}", where=str(folder)
        ) from error
    files = (*sums, SUMS_NAME)
    return Exported(folder, chosen, manifest.step, files, len(weights), which, note)


def _read(source: Path) -> tuple[Manifest, Snapshot]:
    read = read_newest(source)
    if read is None:
        raise MissingDataError(
            "no checkpoint was found",
            where=str(source),
            rule="a run folder, a folder of checkpoints, or a checkpoint in it",
            remedy="list the runs with `surefoot runs`",
        )
    return read


def _gpt_config(architecture: Any) -> GPTConfig | None:
    if not isinstance(architecture, Mapping) or architecture.get("kind") != "gpt":
        return None
    known = {field.name for field in fields(GPTConfig)}
    return GPTConfig(**{name: v for name, v in architecture.items() if name in known})


def _separate(weights: Mapping[str, Any]) -> dict[str, Tensor]:
    # A checkpoint stores tied tensors once; here each name gets its own.
    return {
        name: tensor.detach().clone().contiguous()
        for name, tensor in weights.items()
        if isinstance(tensor, Tensor)
    }


def _save(tensors: Mapping[str, Tensor], path: Path) -> None:
    seen: set[int] = set()
    own = {}
    for name, tensor in tensors.items():
        pointer = tensor.data_ptr()
        own[name] = tensor.clone() if pointer in seen else tensor.contiguous()
        seen.add(pointer)
    save_file(own, path, {"format": "pt"})


def _dtype(tensors: Mapping[str, Tensor]) -> str:
    return str(next(iter(tensors.values())).dtype).removeprefix("torch.")


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
