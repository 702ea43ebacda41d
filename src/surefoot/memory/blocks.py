"""Finds the layers of a model that repeat. Changes nothing."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn


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
