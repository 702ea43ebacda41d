"""Whether a plain loss function returns a sum, as it must, or a mean: asked once, on a few samples.

A mean would train without a word, with a gradient that is too small by the size of the batch. The
check leaves no trace in gradients, modes or random state, and says nothing where it cannot tell.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from surefoot.core.errors import ModelError
from surefoot.data.batch import map_tensors, move_to
from surefoot.numerics.determinism import preserved_rng
from surefoot.numerics.modes import evaluation_mode
from surefoot.tasks.task import FunctionTask, count_samples

NUM_SAMPLES = 4
TOLERANCE = 1e-3
"""Relative; a sum is off by 1, so nothing near this is needed."""


def refuse_a_mean(model: nn.Module, task: FunctionTask, batch: Any, device: torch.device) -> None:
    """Compares the loss of a few samples with the loss of the same samples given twice.

    A sum doubles; a mean stays. Anything else (a loss over pairs, or one that fails on so few
    samples) is let pass.

    Args:
        batch: a collated batch on the CPU; its first samples are used.

    Raises:
        ModelError: the loss, or one of its terms, stays the same.
    """
    try:
        once, twice = _losses(model, task, batch, device)
    except Exception:
        # Whatever is wrong with the batch or the model, the first update says it in its place.
        return
    for term, loss in once.items():
        if loss and abs(twice[term] / loss - 1.0) < TOLERANCE:
            name = f"the loss term '{term}'" if term else "the loss"
            raise ModelError(
                f"{name} is a mean, not a sum: {loss:.6g} for a few samples, {twice[term]:.6g} for "
                "the same samples twice",
                where=getattr(task.loss_fn, "__qualname__", type(task.loss_fn).__name__),
                rule="a loss is summed over the samples of a batch; the update divides it once, by "
                "the weight of the whole window",
                remedy='sum it: loss.sum(), or reduction="sum" in torch\'s losses',
            )


def _losses(
    model: nn.Module, task: FunctionTask, batch: Any, device: torch.device
) -> tuple[dict[str, float], dict[str, float]]:
    size = int(count_samples(batch))

    def first(tensor: Tensor) -> Tensor:
        return tensor[:NUM_SAMPLES] if tensor.ndim and tensor.shape[0] == size else tensor

    few = map_tensors(batch, first)
    count = int(count_samples(few))

    def doubled(tensor: Tensor) -> Tensor:
        each = tensor.ndim and tensor.shape[0] == count
        return torch.cat([tensor, tensor]) if each else tensor

    with evaluation_mode(model), preserved_rng(device), torch.no_grad():
        once = _numbers(task.loss_fn(model, move_to(few, device)))
        twice = _numbers(task.loss_fn(model, move_to(map_tensors(few, doubled), device)))
    return once, twice


def _numbers(loss: Tensor | Mapping[str, Tensor]) -> dict[str, float]:
    terms = loss if isinstance(loss, Mapping) else {"": loss}
    return {term: float(value) for term, value in terms.items()}
