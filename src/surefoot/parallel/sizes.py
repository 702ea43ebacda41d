"""How large parameters are. Counts; looks at no value."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True)
class ParameterSizes:
    """Of some parameters of a model, each tied one once."""

    num_elements: int = 0
    num_trained: int = 0
    """Of these, elements that are trained."""
    num_bytes: int = 0

    @classmethod
    def of(cls, model: nn.Module) -> ParameterSizes:
        """Of all parameters that a module holds."""
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
