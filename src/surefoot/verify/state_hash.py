"""One hash of the whole state of a run, so that `==` compares two runs.

Measured values (wall time, byte offsets of logs) are left out; everything else counts, to the bit.
It never loads a model.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import xxhash

from surefoot.state.checkpoint import read_checkpoint
from surefoot.state.tree import Snapshot

MEASURED = {("progress", "spent_seconds"), ("log_offsets",)}
"""Paths of values that two equal runs may differ in."""


def piece_hashes(snapshot: Snapshot) -> dict[str, str]:
    """xxh3-128 of each tensor (name, dtype, shape, bytes) and of each top-level JSON part."""
    pieces = {}
    for name, tensor in snapshot.tensors.items():
        flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        hasher = xxhash.xxh3_128(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}|".encode())
        hasher.update(flat.numpy().data)
        pieces[name] = hasher.hexdigest()
    for part, value in _without_measured(snapshot.values).items():
        text = json.dumps(value, sort_keys=True)
        pieces[f"{part}.json"] = xxhash.xxh3_128_hexdigest(text.encode())
    return pieces


def state_hash(snapshot: Snapshot) -> str:
    """xxh3-128 over the hashes of all pieces, sorted by name."""
    lines = [f"{name} {digest}\n" for name, digest in sorted(piece_hashes(snapshot).items())]
    return xxhash.xxh3_128_hexdigest("".join(lines).encode())


def checkpoint_hash(folder: Path) -> str:
    """The state hash of a published checkpoint.

    Raises:
        CheckpointError: it is damaged.
    """
    return state_hash(read_checkpoint(folder)[1])


def first_difference(ours: Snapshot, theirs: Snapshot) -> str | None:
    """Name of the first piece (in sorted order) in which two states differ, or None."""
    return next(iter(differing_pieces(ours, theirs)), None)


def differing_pieces(ours: Snapshot, theirs: Snapshot) -> list[str]:
    """Names of all pieces in which two states differ, sorted."""
    mine, other = piece_hashes(ours), piece_hashes(theirs)
    return [name for name in sorted({*mine, *other}) if mine.get(name) != other.get(name)]


def _without_measured(values: dict[str, Any]) -> dict[str, Any]:
    kept = {}
    for part, value in values.items():
        if (part,) in MEASURED:
            continue
        if isinstance(value, dict):
            value = {k: v for k, v in value.items() if (part, k) not in MEASURED}
        kept[part] = value
    return kept
