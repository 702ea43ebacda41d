"""Compiles a model in place, completely or block by block; runs probes uncompiled.

Equal blocks share one compiled graph, so that a model of any depth compiles in the time of one
block.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch
from torch import nn

from surefoot.core.errors import RequestError
from surefoot.memory.blocks import repeated_lists

Extent = Literal["off", "blocks", "whole"]
MIN_ALIKE = 2


def compile_model(model: nn.Module, extent: Extent) -> None:
    """Compiles in place, so that parameter names carry no wrapper prefix.

    Raises:
        RequestError: `blocks` is asked of a model that has none.
    """
    if extent == "whole":
        model.compile()
    elif extent == "blocks":
        blocks = blocks_to_compile(model)
        if not blocks:
            raise RequestError(
                f"{type(model).__name__} has no layers that are built alike",
                where="train.compile",
                rule="`blocks` compiles each module of the model's `blocks`, or of its largest "
                "nn.ModuleList of equal layers",
                remedy="use train.compile=whole, or name the list of layers `blocks`",
            )
        for block in blocks:
            block.compile()


def blocks_to_compile(model: nn.Module) -> list[nn.Module]:
    """The layers of a model that may be compiled separately, such as those of a transformer.

    These are the modules of `model.blocks` where that is an `nn.ModuleList`. Otherwise they are
    those of the list with the most parameters among the lists of repeated layers whose parameters
    have the same names and shapes. Empty where there is no such list.
    """
    named = getattr(model, "blocks", None)
    if isinstance(named, nn.ModuleList):
        return list(named)
    alike = [blocks for blocks in repeated_lists(model) if _are_alike(blocks)]
    return max(alike, key=_num_parameters, default=[])


def _are_alike(blocks: list[nn.Module]) -> bool:
    """Whether layers of one class share one compiled graph."""
    shapes = {tuple((name, p.shape) for name, p in block.named_parameters()) for block in blocks}
    return len(blocks) >= MIN_ALIKE and len(shapes) == 1 and _num_parameters(blocks) > 0


def _num_parameters(blocks: list[nn.Module]) -> int:
    return sum(parameter.numel() for block in blocks for parameter in block.parameters())


@contextmanager
def uncompiled(extent: Extent) -> Iterator[None]:
    """Context manager in which compiled modules run uncompiled.

    A probe has other sizes than the training: it would be compiled separately, and would cause a
    recompilation of the training with dynamic sizes.
    """
    if extent == "off":
        yield  # Nothing is compiled, and to ask the compiler would load it.
        return
    with torch.compiler.set_stance("force_eager"):
        yield
