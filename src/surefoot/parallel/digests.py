"""Digests of weights, to compare ranks."""

from __future__ import annotations

import torch
import xxhash
from torch import nn


def digest_of_weights(model: nn.Module) -> str:
    """Digest of all parameters and buffers, before they are distributed over ranks."""
    found = xxhash.xxh3_128()
    for name, tensor in model.state_dict().items():
        found.update(name.encode())
        if isinstance(tensor, torch.Tensor):
            whole = tensor.detach().cpu().to_dense().contiguous()
            found.update(whole.reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()
