"""A constant tensor of a task, copied once to each device that asks for it.

A copy on every batch would make the host wait for the device each time.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def widest(device: torch.device) -> torch.dtype:
    """Float64 where the device has it, else float32."""
    return torch.float32 if device.type == "mps" else torch.float64


class ConstantTensor:
    """Holds a tensor on the CPU and its copies; pickles without the copies."""

    def __init__(self, values: Tensor) -> None:
        self.values = values.detach().cpu()
        self._copies: dict[tuple[torch.device, torch.dtype], Tensor] = {}

    def on(self, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
        """The constant on `device`, in its own dtype or in `dtype`."""
        key = (device, dtype or self.values.dtype)
        copy = self._copies.get(key)
        if copy is None:
            copy = self._copies[key] = self.values.to(*key)
        return copy

    def __getstate__(self) -> dict[str, Any]:
        return {"values": self.values, "_copies": {}}
