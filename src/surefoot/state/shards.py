"""How the tensors of a state are distributed over ranks, and which rank writes what.

A replicated tensor is written once. A sharded one (a DTensor) is written in chunks, each once, as
planned by torch's distributed checkpoint. Reads and writes no file.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

READS_AS_A_PART = re.compile(r"@[0-9,]*\Z")


class Box(NamedTuple):
    """A part of a tensor: offset and size along each dim."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        return cls((0,) * len(shape), tuple(shape))

    @property
    def numel(self) -> int:
        return prod(self.sizes)

    def slices(self, origin: Sequence[int]) -> tuple[slice, ...]:
        """Its slices in a tensor that begins at `origin`."""
        return tuple(
            slice(offset - start, offset - start + size)
            for offset, size, start in zip(self.offsets, self.sizes, origin, strict=True)
        )

    def meet(self, other: Box) -> Box | None:
        """The intersection of two parts of a tensor; None if empty."""
        offsets, sizes = [], []
        for mine, size, theirs, length in zip(
            self.offsets, self.sizes, other.offsets, other.sizes, strict=True
        ):
            begin, end = max(mine, theirs), min(mine + size, theirs + length)
            if end <= begin:
                return None
            offsets.append(begin)
            sizes.append(end - begin)
        return Box(tuple(offsets), tuple(sizes))


@dataclass(frozen=True)
class Piece:
    """A part of a tensor that this rank holds."""

    name: str
    shape: tuple[int, ...]
    """Shape of the full tensor."""
    box: Box
    data: Tensor

    @property
    def key(self) -> str:
        """Its name in a file: that of the tensor and, for a part, its offsets.

        Unique: a full tensor whose name looks like that of a part gets its offsets, too.
        """
        if self.box.sizes == self.shape and not READS_AS_A_PART.search(self.name):
            return self.name
        return f"{self.name}@{','.join(map(str, self.box.offsets))}"

    @property
    def num_bytes(self) -> int:
        return self.data.numel() * self.data.element_size()


def is_sharded(tensor: Tensor) -> bool:
    """Whether it is a DTensor: its shape is that of all ranks together."""
    return hasattr(tensor, "placements") and hasattr(tensor, "device_mesh")


def pieces_of(tensors: Mapping[str, Tensor]) -> list[Piece]:
    """This rank's pieces of each tensor; nothing is copied."""
    pieces: list[Piece] = []
    for name, tensor in tensors.items():
        shape = tuple(tensor.shape)
        if is_sharded(tensor):
            pieces += [Piece(name, shape, box, data) for box, data in sharded_parts(tensor)]
        else:
            pieces.append(Piece(name, shape, Box.whole(shape), tensor.detach()))
    return pieces


def sharded_parts(tensor: Tensor) -> list[tuple[Box, Tensor]]:
    """The parts of a DTensor on this rank, as torch's planner splits them; possibly none."""
    from torch.distributed.checkpoint import DefaultSavePlanner

    planner = DefaultSavePlanner(flatten_state_dict=False)
    planner.set_up_planner(state_dict={"tensor": tensor}, storage_meta=None, is_coordinator=False)
    parts = []
    for item in planner.create_local_plan().items:
        assert item.tensor_data is not None
        chunk = item.tensor_data.chunk
        data: Any = planner.resolve_data(item)
        if data.numel():
            parts.append((Box(tuple(chunk.offsets), tuple(chunk.sizes)), data.detach()))
    return parts


def choose_writers(held: Sequence[Mapping[str, int]]) -> dict[str, int]:
    """Which rank writes each piece: of those that hold it, the one with the least to write so far.

    Args:
        held: for each rank, the bytes of each piece that it holds, by key.
    """
    holders: dict[str, list[int]] = {}
    size: dict[str, int] = {}
    for rank, pieces in enumerate(held):
        for key, num_bytes in pieces.items():
            holders.setdefault(key, []).append(rank)
            size[key] = num_bytes
    load = [0] * len(held)
    writers = {}
    for key in sorted(holders, key=lambda key: (-size[key], key)):
        writer = min(holders[key], key=lambda rank: (load[rank], rank))
        load[writer] += size[key]
        writers[key] = writer
    return writers


def laid_out_like(live: Tensor, read: Callable[[Box], Tensor]) -> Tensor:
    """A DTensor with the layout of `live`, read part by part.

    Args:
        live: a DTensor.
        read: returns the data of a box, on the CPU.
    """
    from torch.distributed.tensor import DTensor

    sharded: Any = live
    local = torch.empty_like(sharded.to_local(), device="cpu", requires_grad=False)
    for box, _ in sharded_parts(live):
        local.copy_(read(box))
    return DTensor.from_local(
        local.to(sharded.to_local().device),
        device_mesh=sharded.device_mesh,
        placements=sharded.placements,
        run_check=False,
        shape=live.shape,
        stride=live.stride(),
    )
