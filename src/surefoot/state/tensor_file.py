"""Writes tensors in the safetensors format, computing the digest in the same pass.

Data goes from the tensor's memory to disk without a copy, in blocks between which other threads
run. The safetensors library reads the files; this module reads none.

Format: https://github.com/huggingface/safetensors (8 bytes of header length, little-endian; a JSON
header of dtype, shape and offsets; the data of all tensors in order).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import torch
import xxhash
from torch import Tensor
from torch.nn.parameter import is_lazy

from surefoot.core.errors import CheckpointError
from surefoot.state.durable import sync_path
from surefoot.state.manifest import FileEntry

BLOCK_BYTES = 1 << 24
ALIGNMENT_BYTES = 8
DTYPE_NAMES: Final[Mapping[torch.dtype, str]] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> FileEntry:
    """Writes a new file durably.

    Args:
        tensors: dense tensors by name, on any device; a view is written as its visible content.

    Raises:
        CheckpointError: a tensor cannot be written, see `refuse_unwritable`.
        OSError: the disk refuses.
    """
    digest = xxhash.xxh3_128()
    size = 0
    with path.open("xb", buffering=0) as file:
        for block in _blocks(tensors):
            digest.update(block)
            while block:
                written = file.write(block)
                size += written
                block = block[written:]
    sync_path(path)
    return FileEntry(size, digest.hexdigest())


def _blocks(tensors: Mapping[str, Tensor]) -> Iterator[memoryview]:
    header: dict[str, Any] = {}
    begin = 0
    # Widest dtypes first, so that each tensor is aligned to its item size.
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))
    for name, tensor in ordered:
        end = begin + tensor.numel() * tensor.element_size()
        refuse_unwritable(name, tensor)
        header[name] = {
            "dtype": DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
        begin = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT_BYTES)
    yield memoryview(len(text).to_bytes(8, "little") + text)
    for _, tensor in ordered:
        data = memoryview(_bytes_of(tensor))
        for start in range(0, len(data), BLOCK_BYTES):
            yield data[start : start + BLOCK_BYTES]


def _bytes_of(tensor: Tensor) -> Any:
    flat = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
    if flat.stride(0) != 1:
        # torch counts one element (or none) as contiguous at any stride, but cannot view it.
        flat = flat.clone(memory_format=torch.contiguous_format)
    if sys.byteorder == "big":
        flat = flat.clone()
        flat.untyped_storage().byteswap(flat.dtype)
    return flat.view(torch.uint8).numpy()


def refuse_unwritable(name: str, tensor: Tensor) -> None:
    """Refuses a tensor that the format cannot hold; reads no values.

    Raises:
        CheckpointError: its dtype is not in the format, it is sparse or nested, or it has no
            storage, such as an uninitialized one.
    """
    if is_lazy(tensor):
        what = "an uninitialized tensor"
    elif tensor.is_nested:
        what = "a nested tensor"
    elif tensor.dtype not in DTYPE_NAMES or tensor.layout is not torch.strided:
        what = f"a tensor of type {tensor.dtype} ({tensor.layout})"
    elif tensor.numel() and not tensor.data_ptr():
        what = f"a {type(tensor).__name__} without storage ({tensor.device.type})"
    else:
        return
    raise CheckpointError(
        f"{what} cannot be stored",
        where=name,
        rule=f"dense tensors of {', '.join(sorted(DTYPE_NAMES.values()))}",
        remedy="store it in another form, or leave it out of the state (persistent=False)",
    )
