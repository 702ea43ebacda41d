"""Weights only: read from a run, a checkpoint or a safetensors file, to start a new run.

A warm start, never a resume: step, optimizer and random state start anew. Executes nothing.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from surefoot.core.errors import CheckpointError, MissingDataError
from surefoot.state.checkpoint_search import read_newest
from surefoot.state.run_state import check_same_tensors, weights_of
from surefoot.state.tree import memory_seen


def read_weights(path: str | Path) -> dict[str, Tensor]:
    """The model's tensors by name, on the CPU.

    Args:
        path: a run folder or a folder of checkpoints (the newest complete one), a checkpoint
            folder, or a safetensors file.

    Raises:
        MissingDataError: `path` does not exist.
        CheckpointError: it is damaged, or not in a supported form.
    """
    path = Path(path)
    if not path.exists():
        raise MissingDataError(f"there are no weights at {path}", where="model.initial_weights")
    read = read_newest(path)
    if read is not None:
        weights: dict[str, Tensor] = weights_of(read[1])
    elif path.is_file() and path.suffix == ".safetensors":
        try:
            weights = load_file(path)
        except SafetensorError as error:
            raise CheckpointError(f"{path.name} is damaged: {error}", where=str(path)) from error
    else:
        raise CheckpointError(
            f"{path.name} has no weights in a supported form",
            where=str(path),
            rule="a run folder, a checkpoint folder, or a safetensors file",
            remedy="save the state dict with safetensors.torch.save_file",
        )
    return weights


def start_from(model: nn.Module, path: str | Path) -> None:
    """Copies the weights at `path` into `model`, converted to the model's dtypes.

    Raises:
        CheckpointError: they are of another model; names the first differing tensors.
    """
    weights = read_weights(path)
    ours = model.state_dict()
    # A file stores a tied tensor once; the model names it twice.
    for name, tensor in ours.items():
        if name not in weights:
            twin = next((n for n in ours if n in weights and _is_one(ours[n], tensor)), None)
            if twin is not None:
                weights[name] = weights[twin]
    check_same_tensors(ours, weights, same_dtype=False)
    model.load_state_dict(weights)


def _is_one(value: Any, other: Any) -> bool:
    """Whether two entries of a model's state are one tensor under two names."""
    both = isinstance(value, Tensor) and isinstance(other, Tensor)
    return both and value.numel() > 0 and memory_seen(value) == memory_seen(other)
