"""Trades of time for memory. None of them changes a result."""

from __future__ import annotations

from typing import Literal

from surefoot.config.fields import Section, Whole


class MemorySection(Section):
    """What is recomputed or offloaded instead of being kept on the device."""

    recompute: Literal["none", "blocks", "selective", "budget"] = "none"
    """Recompute activations: of whole blocks, of all but matrix products and attention, or of as
    many blocks as a budget requires."""
    recompute_every: Whole = 1
    """Recompute every n-th block only."""
    recompute_budget_mib: Whole = 1024
    """With `budget`: what the blocks of one micro-batch may keep on a rank, in MiB."""
    offload_activations: Literal["off", "cpu", "nvme"] = "off"
    """Where activations saved for the backward are kept; a drive (`nvme`) is refused."""
    offload_optimizer: Literal["off", "cpu"] = "off"
    """Where optimizer state is kept between steps."""
    offload_parameters: Literal["off", "cpu"] = "off"
    """Where the weights of a block are kept while other blocks compute."""
    loss: Literal["whole", "chunked"] = "whole"
    """Next-token loss from all logits at once, or from chunks of `loss_chunk` tokens, recomputed in
    the backward."""
    loss_chunk: Whole = 2048
    """Number of tokens whose logits are held at once."""
    optimizer_in_backward: bool = False
    """Step each weight as soon as its gradient is ready: refused, with the reason."""
