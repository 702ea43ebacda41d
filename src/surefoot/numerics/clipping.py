"""Global gradient norm, the flag that follows from it, and clipping by it; on the device.

It never waits for the device and never looks at shards: a sharded run hands in the reduction that
makes a local norm global. Clipping each parameter by its own norm would change the direction of
the update; it is not offered here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

import torch
from torch import Tensor

from surefoot.core.errors import RequestError
from surefoot.core.identity import identity

NORM_OFFSET: Final = 1e-6
"""Added to the norm before the division, as `torch.nn.utils.clip_grad_norm_` does."""

PIECE: Final = 1 << 14
"""Elements of a tensor whose squares are added to one running float32 on the CPU."""

_LOW_PRECISION: Final = frozenset({torch.float16, torch.bfloat16})


def gradients_of(parameters: Iterable[Tensor]) -> list[Tensor]:
    """The gradients that are there, in the order of the parameters."""
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


def tensor_norms(tensors: Sequence[Tensor]) -> Tensor:
    """L2 norm of each tensor.

    Low-precision tensors accumulate in float32; float64 stays float64. On the CPU a long tensor is
    added up in pieces.

    Args:
        tensors: tensors of one device, at least one.

    Returns:
        A 1-D tensor, one norm a tensor, in the order given.
    """
    dtypes = {tensor.dtype for tensor in tensors}
    wide = torch.float64 if torch.float64 in dtypes else torch.float32
    if max(map(Tensor.numel, tensors)) > PIECE and any(map(_is_long, tensors)):
        return torch.stack([_norm_by_pieces(tensor, wide) for tensor in tensors])
    dtype = None if dtypes.isdisjoint(_LOW_PRECISION) else wide
    return torch.stack(torch._foreach_norm(list(tensors), 2.0, dtype=dtype))


def _is_long(tensor: Tensor) -> bool:
    return tensor.numel() > PIECE and tensor.device.type == "cpu" and tensor.dtype != torch.float64


def _norm_by_pieces(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """The L2 norm of a tensor on the CPU, 0-dim.

    Torch adds its squares to one running float32, which loses what is small beside it (16 million
    equal values: 0.9 %), so that the number of shards would show.
    """
    pieces = torch._foreach_norm(list(tensor.reshape(-1).split(PIECE)), 2.0, dtype=dtype)
    out: Tensor = torch.linalg.vector_norm(torch.stack(pieces), dtype=torch.float64).to(dtype)
    return out


def global_norm(
    gradients: Sequence[Tensor], combine: Callable[[Tensor], Tensor] = identity
) -> Tensor:
    """L2 norm over all gradients as if they were one vector.

    Equal to `torch.nn.utils.get_total_norm` for float32 and float64; low-precision gradients
    accumulate in float32. A sum of squares beyond the range of float32 gives infinity, and the
    update then counts as non-finite.

    Args:
        gradients: gradients of one device; may be empty.
        combine: turns the norm of this rank's gradients into that of all ranks' (0-dim to 0-dim).

    Returns:
        0-dim tensor; 0 for no gradients.
    """
    if not gradients:
        return combine(torch.zeros(()))
    return combine(torch.linalg.vector_norm(tensor_norms(gradients)))


def weight_norm(parameters: Iterable[Tensor]) -> Tensor:
    """L2 norm over all parameters, a 0-dim tensor. Decay that is too weak shows as steady growth.

    Args:
        parameters: parameters of one device.
    """
    return global_norm([parameter.detach() for parameter in parameters])


@dataclass(eq=False)
class Flag:
    """Lazy device flag: `norm < limit`, a 0-dim bool tensor beside the norm; false for NaN.

    Where the host has seen the norm before the optimizer steps, and nothing else follows the flag,
    its kernel is never launched. It is made at most once, and never waited for.

    Args:
        norm: global gradient norm, 0-dim; not changed between the making and the first call.
        limit: what the guard lets through; infinity for all that is finite.
    """

    norm: Tensor
    limit: float
    _value: Tensor | None = field(default=None, init=False)

    def __call__(self) -> Tensor:
        if self._value is None:
            self._value = self.norm < self.limit
        return self._value


class Clip(Protocol):
    """Changes the gradients of an update in place, on their device, without waiting for it.

    One with a `max_norm` says from which norm on an update counts as clipped in the log.
    """

    def __call__(self, gradients: Sequence[Tensor], norm: Tensor, /) -> None:
        """Clips.

        Args:
            gradients: those that are there, as they lie on this rank; may be empty.
            norm: the global norm over all ranks, 0-dim, on the device.
        """
        ...


@dataclass(frozen=True)
class ClipNorm:
    """Clips by global norm: `g *= min(1, max_norm / (norm + 1e-6))` (torch's formula).

    A factor for all gradients keeps the direction. A non-finite norm spoils the gradients, which
    is why the finite flag is taken before the clip and the update skipped by it.

    Args:
        max_norm: largest norm that leaves the gradients as they are.

    Raises:
        RequestError: `max_norm` is not positive and finite.
    """

    max_norm: float

    def __post_init__(self) -> None:
        if not (math.isfinite(self.max_norm) and self.max_norm > 0):
            raise RequestError(
                f"clip_norm is {self.max_norm}",
                where="train.clip_norm",
                rule="a clipping norm is positive and finite",
                remedy="1.0 is usual, 0.5 to 2.0 are worth a try; `off` turns clipping off",
            )

    def __call__(self, gradients: Sequence[Tensor], norm: Tensor) -> None:
        """Scales `gradients` in place.

        Args:
            gradients: gradients of one device; may be empty.
            norm: their global norm, 0-dim.
        """
        if gradients:
            # `max_norm / x` is `max_norm * (1 / x)` in torch; times one is left out.
            factor = (norm + NORM_OFFSET).reciprocal_()
            if self.max_norm != 1.0:
                factor.mul_(self.max_norm)
            torch._foreach_mul_(list(gradients), factor.clamp_(max=1.0))


@dataclass(frozen=True)
class NoClip:
    """Leaves gradients as they are."""

    def __call__(self, gradients: Sequence[Tensor], norm: Tensor) -> None:
        return None
