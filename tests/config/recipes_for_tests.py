"""Recipes that the tests of this room start from."""

from __future__ import annotations

import copy
from typing import Any

GPT: dict[str, Any] = {
    "name": "tiny",
    "model": {
        "kind": "gpt",
        "num_layers": 2,
        "num_heads": 2,
        "embedding_dim": 32,
        "feedforward_dim": 64,
    },
    "data": {"kind": "text", "sequence_length": 64},
    "task": {"kind": "generation"},
    "train": {"horizon": "200 steps", "micro_batch": 4},
}

IMAGES: dict[str, Any] = {
    "name": "tiny-images",
    "model": {"kind": "resnet", "widths": [8, 16]},
    "data": {"kind": "digits"},
    "task": {"kind": "classification"},
    "train": {"horizon": "3 epochs", "micro_batch": 32},
    "optimizer": {"kind": "sgd", "lr": 0.1},
}


def changed(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """A copy of `base` with dotted keys set."""
    recipe = copy.deepcopy(base)
    for path, value in changes.items():
        *parents, key = path.split(".")
        node = recipe
        for parent in parents:
            node = node.setdefault(parent, {})
        node[key] = copy.deepcopy(value)
    return recipe
