"""Copies what a checkpoint holds into host memory, so that the training can go on meanwhile.

Memory is kept and used again: the second copy costs no more than the transfer itself. Pinned where
it comes from a CUDA device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from surefoot.state.shards import Piece


class HostStage:
    """Host memory for one checkpoint of this rank."""

    def __init__(self) -> None:
        self._held: dict[str, Tensor] = {}

    def copy(self, pieces: Sequence[Piece]) -> list[Piece]:
        """The same pieces in memory of their own; returns when all has arrived."""
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
