"""Finds the layers of a model that repeat. Changes nothing."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from surefoot.core.errors import RequestError


def repeated_blocks(model: nn.Module) -> Sequence[nn.Module]:
    """The outermost layers that repeat: the items of each list of modules of one class.

    A list of one counts: a stage of a pipeline may hold a single layer.
    """
    found: list[nn.Module] = []

    def walk(module: nn.Module) -> None:
        for child in module.children():
            items = list(child) if isinstance(child, nn.ModuleList) else []
            nested = any(isinstance(item, nn.ModuleList) for item in items)
            if items and not nested and len({type(item) for item in items}) == 1:
                found.extend(items)
            else:
                walk(child)

    walk(model)
    return found


def blocks_for(model: nn.Module, where: str, what: str, without: str) -> Sequence[nn.Module]:
    """The layers that repeat, for a setting that works on them.

    Args:
        where: the setting.
        what: what it does, for the sentence "WHAT: an item of an nn.ModuleList of one class".
        without: its value that needs no blocks.

    Raises:
        RequestError: there are none.
    """
    blocks = repeated_blocks(model)
    if not blocks:
        raise RequestError(
            f"{type(model).__name__} has no layers that repeat",
            where=where,
            rule=f"{what}: an item of an nn.ModuleList of one class",
            remedy=f"use {where}={without}, or put the layers into an nn.ModuleList",
        )
    return blocks
