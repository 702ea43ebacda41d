"""Copies the pieces of a checkpoint to host memory, so that training can continue meanwhile.

Buffers are reused: a second copy costs no more than the transfer. They are pinned if the source is
a CUDA device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from surefoot.state.shards import Piece


class HostStage:
    """Host buffers for one checkpoint of this rank."""

    def __init__(self) -> None:
        self._held: dict[str, Tensor] = {}

    def copy(self, pieces: Sequence[Piece]) -> list[Piece]:
        """The same pieces in host memory; returns once all copies are complete."""
        staged = []
        on_cuda = False
        for piece in pieces:
            data = piece.data
            place = self._held.get(piece.key)
            if place is None or place.shape != data.shape or place.dtype != data.dtype:
                place = torch.empty(data.shape, dtype=data.dtype, pin_memory=data.is_cuda)
                self._held[piece.key] = place
            place.copy_(data, non_blocking=data.is_cuda)
            on_cuda = on_cuda or data.is_cuda
            staged.append(replace(piece, data=place))
        if on_cuda:
            torch.cuda.current_stream().synchronize()
        return staged
