"""Writes tensors to a file in the safetensors format, and its digest in the same pass.

The bytes go from the tensor's memory to the disk without a copy, in blocks during which other
threads run. Files are read by the safetensors library; this module reads none.

Format: https://github.com/huggingface/safetensors (8 bytes of header length, little-endian; a JSON
header of dtype, shape and offsets; the data, one tensor after the other).
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
    """Writes a new file and makes it durable.

    Args:
        tensors: dense tensors by name, on any device; views are written as what they show.

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
    # The widest numbers first: then each tensor begins on a border of its own width.
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
        # torch takes one element (or none) for contiguous at any stride, but does not view it.
        flat = flat.clone(memory_format=torch.contiguous_format)
    if sys.byteorder == "big":
        flat = flat.clone()
        flat.untyped_storage().byteswap(flat.dtype)
    return flat.view(torch.uint8).numpy()


def refuse_unwritable(name: str, tensor: Tensor) -> None:
    """Refuses a tensor that the format cannot hold; its numbers are not looked at.

    Raises:
        CheckpointError: it has a number type that the format has not, is sparse or nested, or has
            no memory, such as one that is not initialized yet.
    """
    if is_lazy(tensor):
        what = "a tensor that is not initialized yet"
    elif tensor.is_nested:
        what = "a nested tensor"
    elif tensor.dtype not in DTYPE_NAMES or tensor.layout is not torch.strided:
        what = f"a tensor of type {tensor.dtype} ({tensor.layout})"
    elif tensor.numel() and not tensor.data_ptr():
        what = f"a {type(tensor).__name__} without memory of its own ({tensor.device.type})"
    else:
        return
    raise CheckpointError(
        f"{what} cannot be kept",
        where=name,
        rule=f"dense tensors of {', '.join(sorted(DTYPE_NAMES.values()))}",
        remedy="keep it in another form, or leave it out of the state (persistent=False)",
    )
