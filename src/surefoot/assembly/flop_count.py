"""What one sample of a run costs in floating-point operations: by formula, or counted by torch.

Reads a few samples where it counts, and leaves no trace in the model or in random state.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from surefoot.config.sections import Settings
from surefoot.core.counting import decoder_flops_per_token
from surefoot.core.units import Flops
from surefoot.data.batch import map_tensors, move_to
from surefoot.data.fetch import collated
from surefoot.data.sources.base import Source
from surefoot.data.sources.stream import StreamSource, first_samples
from surefoot.models.gpt import GPT
from surefoot.models.moe import idle_elements
from surefoot.numerics.determinism import preserved_rng
from surefoot.numerics.flops import META, UncountableError, count_flops
from surefoot.tasks.task import Task

NUM_SAMPLES = 4
"""Read to see whether all are of one size; the batch that is counted is made of them."""


@dataclass(frozen=True, slots=True)
class SampleFlops:
    """Operations of one sample's forward and backward, or why they are not known."""

    value: float | None
    unknown: str = ""


def sample_flops(
    model: nn.Module, task: Task, source: Source | StreamSource, settings: Settings
) -> SampleFlops:
    """By formula for our decoders; counted for other models where somebody asks for it.

    A GPU may have a known peak, so a utilization; a horizon may be given in operations.
    """
    if isinstance(model, GPT):
        return SampleFlops(decoder_flops(model))
    has_peak = settings.device in ("auto", "cuda") and torch.cuda.is_available()
    if not has_peak and not isinstance(settings.train.horizon, Flops):
        return SampleFlops(None)
    return counted_flops(model, task, source, settings.train.micro_batch)


def decoder_flops(model: GPT) -> float:
    """Operations of a sequence of full length, by the formula of `decoder_flops_per_token`."""
    config = model.config
    parameters = sum(p.numel() for p in model.parameters()) - idle_elements(model)
    # Embeddings that are only looked up take part in no product.
    if config.positions == "learned":
        parameters -= config.sequence_length * config.embedding_dim
    if not config.tied:
        parameters -= config.vocabulary_size * config.embedding_dim
    return config.sequence_length * decoder_flops_per_token(
        parameters, config.num_layers, config.embedding_dim, config.sequence_length
    )


def counted_flops(
    model: nn.Module, task: Task, source: Source | StreamSource, micro_batch: int
) -> SampleFlops:
    """Counts a micro-batch of the first samples, on shapes alone, and divides by their number.

    Args:
        model: on any device; nothing runs on it.
        task: as the user gave it, before it is laid out over ranks.
        source: its first samples are read and, where all are of one size, repeated.
        micro_batch: what a batch holds in training: a loss over pairs costs more in a larger one.
    """
    try:
        with preserved_rng():
            if not (first := first_samples(source, NUM_SAMPLES)):
                return SampleFlops(None, "a stream is not read ahead")
            shapes = {str(_shapes(collated(source, [sample], [0]))) for sample in first}
            if len(shapes) > 1:
                return SampleFlops(None, "samples are of several sizes")
            repeated = [first[index % len(first)] for index in range(micro_batch)]
            batch = collated(source, repeated, range(micro_batch))
            on_meta = move_to(batch, META)
        flops = count_flops(model, lambda copied: task.loss_sum(copied, on_meta))
    except UncountableError as error:
        return SampleFlops(None, str(error))
    except Exception as error:
        # Whatever is wrong with the data, the first update says it in its place.
        return SampleFlops(None, f"{type(error).__name__}: {error}")
    return SampleFlops(flops / micro_batch)


def _shapes(batch: Any) -> list[tuple[int, ...]]:
    found: list[tuple[int, ...]] = []

    def note(tensor: Tensor) -> Tensor:
        found.append(tuple(tensor.shape))
        return tensor

    map_tensors(batch, note)
    return found
