"""Short digests of batches and samples, to tell equal ones without keeping any.

Reads a strided sample of values; on a device only where the audit is deep.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Iterable
from typing import Any

import torch

from surefoot.sanitizer import graph

BATCH_SAMPLE = 64
ROW_SAMPLE = 32
LEAST_FLOATS = 2
LEAST_INTEGERS = 6
FINE_VALUES = 4
FINE_SHARE = 0.75
_latest: tuple[weakref.ref[torch.Tensor] | None, int, int] = (None, 0, 0)
"""The batch last digested: several rules look at the same one."""


def first_tensor(values: Iterable[Any]) -> torch.Tensor | None:
    """The first dense tensor with a batch axis among the arguments of a call."""
    for tensor in graph.tensors_in(list(values)):
        is_dense = tensor.layout is torch.strided and not tensor.is_nested
        if is_dense and tensor.dim() >= 1 and tensor.numel() > 1:
            return tensor
    return None


def of_batch(tensor: torch.Tensor, deep: bool = False) -> int | None:
    """A digest of a whole batch; None where reading it would wait for a device."""
    global _latest
    if not graph.is_readable(tensor, deep):
        return None
    # Tensors of inference mode count no versions.
    version = -1 if tensor.is_inference() else tensor._version
    reference, seen, digest = _latest
    if version >= 0 and version == seen and reference is not None and reference() is tensor:
        return digest
    flat = _array(tensor).reshape(-1)
    sample = flat[:: max(1, flat.size // BATCH_SAMPLE)][:BATCH_SAMPLE]
    # Not Python's own hash: other ranks must come to the same digest.
    content = repr(tuple(tensor.shape)).encode() + sample.tobytes()
    digest = int.from_bytes(hashlib.blake2b(content, digest_size=8).digest())
    _latest = weakref.ref(tensor), version, digest
    return digest


def of_rows(tensor: torch.Tensor, deep: bool = False) -> list[int]:
    """A digest of each sample of a batch; empty where samples are too small to be told apart."""
    if tensor.dim() < 2 or not graph.is_readable(tensor, deep):
        return []
    rows = _array(tensor).reshape(tensor.shape[0], -1)
    least = LEAST_FLOATS if tensor.is_floating_point() else LEAST_INTEGERS
    if rows.shape[1] < least:
        return []
    sample = rows[:, :: max(1, rows.shape[1] // ROW_SAMPLE)][:, :ROW_SAMPLE]
    content = sample.tobytes()
    size = len(content) // max(len(sample), 1)
    return [hash(content[i : i + size]) for i in range(0, len(content), size)]


def is_fine(tensor: torch.Tensor) -> bool:
    """Whether values are so fine-grained that two equal samples are one sample seen twice."""
    if not tensor.is_floating_point():
        return False
    row = _array(tensor[0]).reshape(-1)[:ROW_SAMPLE]
    return bool(row.size >= FINE_VALUES and len(set(row.tolist())) >= FINE_SHARE * row.size)


def _array(tensor: torch.Tensor) -> Any:
    """The values as numpy sees them, in place where they lie in the host's memory."""
    plain = tensor.detach().cpu()
    if plain.dtype in (torch.bfloat16, torch.complex32):
        plain = plain.float()
    return plain.numpy()


def generator_digest(loader: Any) -> str:
    """A digest of the state of the generator that the next epoch of `loader` will use."""
    generator = getattr(loader.sampler, "generator", None) or loader.generator
    state = torch.get_rng_state() if generator is None else generator.get_state()
    return hashlib.blake2b(state.numpy().tobytes(), digest_size=8).hexdigest()
