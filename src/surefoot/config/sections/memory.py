"""Trades of time for memory. None of them changes a number."""

from __future__ import annotations

from typing import Literal

from surefoot.config.fields import Section, Whole


class MemorySection(Section):
    """What is computed again, or kept elsewhere, instead of being kept."""

    recompute: Literal["none", "blocks", "selective", "budget"] = "none"
    """Activations of whole blocks, all but the products of matrices and attention, or of as many
    blocks as a budget of bytes asks for."""
    recompute_every: Whole = 1
    """Of each n-th block."""
    recompute_budget_mib: Whole = 1024
    """With `budget`: what the blocks of one micro-batch may keep on a rank, in MiB."""
    offload_activations: Literal["off", "cpu", "nvme"] = "off"
    """Where what blocks keep for the backward waits; a drive (`nvme`) is refused."""
    offload_optimizer: Literal["off", "cpu"] = "off"
    """Where the optimizer's state rests between two steps."""
    offload_parameters: Literal["off", "cpu"] = "off"
    """Where the weights of a block wait while other blocks compute."""
    loss: Literal["whole", "chunked"] = "whole"
    """Of next tokens: all scores at once, or those of `loss_chunk` tokens, computed again in the
    backward."""
    loss_chunk: Whole = 2048
    """Tokens whose scores are held at once."""
    optimizer_in_backward: bool = False
    """Steps each weight as soon as its gradient is there: refused, with the reason."""
