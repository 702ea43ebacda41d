"""The tensors of a checkpoint, read on access: completely, or only the requested part.

Files are memory-mapped: untouched parts are not read. Digests have been verified before; nothing is
executed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from surefoot.state.manifest import Manifest, TensorEntry
from surefoot.state.shards import Box


class StoredTensors(Mapping[str, Tensor]):
    """Tensors by name, on the CPU.

    Raises:
        ValueError: a file does not match the manifest.
    """

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self._entries = manifest.tensors
        self._files: dict[str, Any] = {}
        for name in sorted({c.file for entry in self._entries.values() for c in entry.chunks}):
            self._files[name] = safe_open(folder / name, framework="pt", device="cpu")
        for name, entry in self._entries.items():
            self._check(name, entry)

    def __getitem__(self, name: str) -> Tensor:
        entry = self._entries[name]
        if len(entry.chunks) == 1:
            (chunk,) = entry.chunks
            tensor: Tensor = self._files[chunk.file].get_tensor(chunk.key)
            return tensor
        return self.part(name, Box.whole(entry.shape))

    def part(self, name: str, box: Box) -> Tensor:
        """A part of a tensor, assembled from the chunks that it overlaps."""
        entry = self._entries[name]
        out = torch.zeros(box.sizes, dtype=_dtype(entry))
        for chunk in entry.chunks:
            held = Box(chunk.offsets, chunk.sizes)
            common = held.meet(box)
            if common is not None:
                stored = self._files[chunk.file].get_slice(chunk.key)
                out[common.slices(box.offsets)] = stored[common.slices(held.offsets)]
        return out

    def shape(self, name: str) -> tuple[int, ...]:
        """Of the full tensor; nothing is read."""
        return self._entries[name].shape

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def _check(self, name: str, entry: TensorEntry) -> None:
        _dtype(entry)
        for chunk in entry.chunks:
            file = self._files[chunk.file]
            if chunk.key not in file.keys():  # noqa: SIM118
                raise ValueError(f"{chunk.file} holds no {chunk.key!r}, a part of {name!r}")
            stored = file.get_slice(chunk.key)
            if tuple(stored.get_shape()) != chunk.sizes:
                raise ValueError(
                    f"{chunk.key!r} has the shape {tuple(stored.get_shape())}, not {chunk.sizes}"
                )


def _dtype(entry: TensorEntry) -> torch.dtype:
    dtype = getattr(torch, entry.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{entry.dtype!r} is not a dtype")
    return dtype
