"""Sizes of parameters. Reads shapes, no values."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True)
class ParameterSizes:
    """Of some parameters of a model; tied parameters count once."""

    num_elements: int = 0
    num_trained: int = 0
    """Number of trained elements."""
    num_bytes: int = 0

    @classmethod
    def of(cls, model: nn.Module) -> ParameterSizes:
        """Of all parameters of a module."""
        parameters = list(model.parameters())
        return cls(
            sum(p.numel() for p in parameters),
            sum(p.numel() for p in parameters if p.requires_grad),
            sum(p.numel() * p.element_size() for p in parameters),
        )

    def __add__(self, other: ParameterSizes) -> ParameterSizes:
        return ParameterSizes(
            self.num_elements + other.num_elements,
            self.num_trained + other.num_trained,
            self.num_bytes + other.num_bytes,
        )

    def __sub__(self, other: ParameterSizes) -> ParameterSizes:
        return ParameterSizes(
            self.num_elements - other.num_elements,
            self.num_trained - other.num_trained,
            self.num_bytes - other.num_bytes,
        )
