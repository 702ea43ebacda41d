"""Finds the repeated layers of a model. Changes nothing."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from surefoot.core.errors import RequestError


def repeated_lists(model: nn.Module) -> list[list[nn.Module]]:
    """The outermost lists of repeated layers: each ModuleList whose items are of one class.

    A list of one counts: a pipeline stage may hold a single layer.
    """
    found: list[list[nn.Module]] = []

    def walk(module: nn.Module) -> None:
        for child in module.children():
            items = list(child) if isinstance(child, nn.ModuleList) else []
            nested = any(isinstance(item, nn.ModuleList) for item in items)
            if items and not nested and len({type(item) for item in items}) == 1:
                found.append(items)
            else:
                walk(child)

    walk(model)
    return found


def repeated_blocks(model: nn.Module) -> Sequence[nn.Module]:
    """The layers of all these lists."""
    return [block for blocks in repeated_lists(model) for block in blocks]


def blocks_for(model: nn.Module, where: str, what: str, without: str) -> Sequence[nn.Module]:
    """The repeated layers, for a setting that needs them.

    Args:
        where: dotted path of the setting.
        what: its effect, for the sentence "WHAT: an item of an nn.ModuleList of one class".
        without: its value that needs no blocks.

    Raises:
        RequestError: there are none.
    """
    blocks = repeated_blocks(model)
    if not blocks:
        raise RequestError(
            f"{type(model).__name__} has no repeated layers",
            where=where,
            rule=f"{what}: an item of an nn.ModuleList of one class",
            remedy=f"use {where}={without}, or put the layers into an nn.ModuleList",
        )
    return blocks
