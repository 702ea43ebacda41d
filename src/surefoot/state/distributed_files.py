"""Reads the tensors of a torch distributed checkpoint without torch's reader, which runs pickles.

Its `.metadata` is a pickle: it is read with inert records in place of every class, so that nothing
it names is called. No path may leave the folder.
"""

from __future__ import annotations

import io
import math
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

METADATA_NAME = ".metadata"
MODULE = "torch.distributed.checkpoint."
RECORDS = frozenset(
    {
        (f"{MODULE}metadata", "Metadata"),
        (f"{MODULE}metadata", "TensorStorageMetadata"),
        (f"{MODULE}metadata", "BytesStorageMetadata"),
        (f"{MODULE}metadata", "TensorProperties"),
        (f"{MODULE}metadata", "ChunkStorageMetadata"),
        (f"{MODULE}metadata", "MetadataIndex"),
        (f"{MODULE}metadata", "StorageMeta"),
        (f"{MODULE}metadata", "_MEM_FORMAT_ENCODING"),
        (f"{MODULE}filesystem", "_StorageInfo"),
        ("torch.serialization", "_get_layout"),
        ("torch", "Size"),
        ("pathlib", "PosixPath"),
        ("pathlib", "PurePosixPath"),
        ("pathlib", "WindowsPath"),
        ("collections", "OrderedDict"),
    }
)
MAX_DIMS = 64


class Record:
    """Replaces an object of a pickle: keeps its constructor arguments and does nothing."""

    arguments: tuple[Any, ...] = ()
    state: Any = None

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def get(self, name: str) -> Any:
        """A field of the object.

        Raises:
            ValueError: it has no such field.
        """
        if not isinstance(self.state, Mapping) or name not in self.state:
            raise ValueError(f"the metadata has no {name}")
        return self.state[name]

    # A pickle may use it as a key before its state is set.
    __hash__ = object.__hash__


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in RECORDS:
            return Record
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise ValueError(f"the metadata names {module}.{name}, which no checkpoint needs")


def read_distributed(folder: Path, most_bytes: int) -> tuple[dict[str, Tensor], list[str]]:
    """All tensors, assembled from their chunks, and the names of entries that are not tensors.

    Args:
        most_bytes: limit for all tensors together.

    Raises:
        ValueError: it is malformed, names a file outside, or declares more than `most_bytes`.
    """
    top = _Unpickler(io.BytesIO((folder / METADATA_NAME).read_bytes())).load()
    if not isinstance(top, Record):
        raise ValueError("the metadata has an unexpected form")
    stored: dict[tuple[str, tuple[int, ...]], Record] = {}
    for index, info in dict(top.get("storage_data")).items():
        # Entries that are not tensors have no offset.
        offset = index.state.get("offset") if isinstance(index.state, Mapping) else None
        stored[str(index.get("fqn")), () if offset is None else _sizes(offset)] = info
    tensors: dict[str, Tensor] = {}
    others: list[str] = []
    total = 0
    for name, described in dict(top.get("state_dict_metadata")).items():
        if not isinstance(described.state, Mapping) or "chunks" not in described.state:
            others.append(str(name))
            continue
        size = _sizes(described.get("size"))
        dtype = _dtype(described.get("properties"))
        total += math.prod(size) * dtype.itemsize
        if total > most_bytes:
            raise ValueError(f"it declares more than its files hold, at {name!r}")
        tensors[str(name)] = _put_together(folder, str(name), size, dtype, described, stored)
    return tensors, others


def _put_together(
    folder: Path,
    name: str,
    size: tuple[int, ...],
    dtype: torch.dtype,
    described: Record,
    stored: Mapping[tuple[str, tuple[int, ...]], Record],
) -> Tensor:
    whole = torch.empty(size, dtype=dtype)
    filled = 0
    for chunk in described.get("chunks"):
        offsets, sizes = _sizes(chunk.get("offsets")), _sizes(chunk.get("sizes"))
        if not len(offsets) == len(sizes) == len(size) or any(
            offset + n > most for offset, n, most in zip(offsets, sizes, size, strict=True)
        ):
            raise ValueError(f"a chunk of {name!r} is outside of it")
        if (name, offsets) not in stored:
            raise ValueError(f"a chunk of {name!r} is not stored")
        part = _read_chunk(folder, stored[name, offsets])
        if tuple(part.shape) != sizes or part.dtype != dtype:
            raise ValueError(f"a chunk of {name!r} does not match its metadata")
        whole[tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))] = part
        filled += part.numel()
    if filled != whole.numel():
        raise ValueError(f"the chunks of {name!r} do not cover it once")
    return whole


def _read_chunk(folder: Path, info: Record) -> Tensor:
    path = inside(folder, str(info.get("relative_path")))
    offset, length = int(info.get("offset")), int(info.get("length"))
    size = path.stat().st_size
    if offset < 0 or length < 0 or offset + length > size:
        raise ValueError(f"a chunk is outside of {path.name}")
    with path.open("rb") as file:
        file.seek(offset)
        data = file.read(length)
    tensor = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    if not isinstance(tensor, Tensor):
        raise ValueError(f"a chunk in {path.name} is not a tensor")
    refuse_expanded(path.name, tensor)
    return tensor


def inside(folder: Path, name: str) -> Path:
    """A regular file directly in `folder`.

    Raises:
        ValueError: the name points elsewhere, or not to a regular file.
    """
    if name in ("", ".", "..") or not name.isprintable() or Path(name).name != name:
        raise ValueError(f"it names a file outside its folder: {name!r}")
    path = folder / name
    if path.is_symlink() or not path.is_file():
        raise ValueError(f"{name} is missing, or is not a regular file")
    return path


def refuse_expanded(name: str, tensor: Tensor) -> None:
    """Refuses a tensor that declares more elements than it stores.

    Raises:
        ValueError: it does, or it is not a dense tensor of numbers.
    """
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.device.type != "cpu":
        raise ValueError(f"{name} is not a dense tensor")
    if tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes():
        raise ValueError(f"{name} declares more elements than it stores")


def _sizes(record: Any) -> tuple[int, ...]:
    # A torch.Size is constructed from a tuple; a record keeps its arguments.
    values = record.arguments[0] if isinstance(record, Record) and record.arguments else ()
    sizes = tuple(values)
    if len(sizes) > MAX_DIMS or any(type(n) is not int or n < 0 for n in sizes):
        raise ValueError(f"a shape is {sizes[:8]!r}")
    return sizes


def _dtype(properties: Record) -> torch.dtype:
    state = properties.state
    first = state[0] if isinstance(state, tuple) and state else None
    if not isinstance(first, torch.dtype):
        raise ValueError("a tensor has no dtype")
    return first
