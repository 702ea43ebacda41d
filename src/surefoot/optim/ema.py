"""An exponential moving average of the weights, kept on the device.

Only trainable weights are averaged, not buffers (such as BatchNorm's running statistics). The model
is changed inside `swapped` only, and restored bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Final

import torch
from torch import Tensor, nn

from surefoot.core.errors import CheckpointError, ModelError, RequestError
from surefoot.optim.decay_rules import named_trainable
from surefoot.optim.ledger import first_few

BUCKET_BYTES: Final = 64 * 2**20
"""Temporary memory of one update of the average; at least the size of the largest tensor."""


class NoAverage:
    """No average: `swapped` leaves the model unchanged."""

    def update(self, finite: Callable[[], Tensor]) -> None:
        return None

    def swapped(self, model: nn.Module) -> AbstractContextManager[None]:
        return nullcontext()

    def state_dict(self) -> dict[str, Any]:
        return {"kind": "none"}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        _same_kind("none", state)


class WeightEma:
    """`average += (1 - decay) * (weight - average)` after each applied update.

    Starts from the weights at construction and averages over about `1 / (1 - decay)` updates. Kept
    in float32 for weights of lower precision. Averaged weights are evaluated with the model's own
    buffers: BatchNorm statistics are those of the raw weights.

    Args:
        model: the model whose trainable weights are averaged; each tied tensor once.
        decay: in [0, 1); 0 keeps the last weights.

    Raises:
        RequestError: the decay is out of range.
        ModelError: nothing is trainable.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        if not 0.0 <= decay < 1.0:
            raise RequestError(
                f"the decay of the average is {decay}",
                where="ema.decay",
                rule="0 <= decay < 1",
                remedy="0.999 averages over about 1000 updates",
            )
        self.decay = decay
        weights = named_trainable(model)
        if not weights:
            raise ModelError(
                "there is nothing to average: no parameter is trainable",
                where=type(model).__name__,
                rule="an average needs trainable weights",
                remedy="turn ema off or unfreeze a part of the model",
            )
        self._weights: list[Tensor] = list(weights.values())
        self._averages = {
            name: weight.detach().to(dtype=_wide(weight.dtype), copy=True)
            for name, weight in weights.items()
        }
        device = self._weights[0].device
        self._num_updates = torch.zeros((), dtype=torch.int64, device=device)
        self._share = torch.tensor(1.0 - decay, dtype=_wide(self._weights[0].dtype), device=device)
        self._buckets = _buckets(list(self._averages.values()))
        self._is_swapped = False

    @property
    def num_updates(self) -> Tensor:
        """Number of updates averaged so far, a 0-dim int64 tensor on the device."""
        return self._num_updates

    @property
    def averages(self) -> Mapping[str, Tensor]:
        """Name to averaged weight: the live tensors, not copies."""
        return self._averages

    @torch.no_grad()
    def update(self, finite: Callable[[], Tensor]) -> None:
        """Adds the current weights if `finite()` (0-dim bool) is true; else changes nothing.

        Raises:
            ModelError: called inside `swapped`.
        """
        if self._is_swapped:
            raise ModelError(
                "the average was updated while the model holds averaged weights",
                where="WeightEma.update",
                rule="training continues with the raw weights",
                remedy="leave `swapped` before the next update",
            )
        applied = finite().to(self._share.device)
        share = self._share * applied
        averages, weights = _parts(self._averages.values()), _parts(self._weights)
        for bucket in self._buckets:
            averaged = [averages[index] for index in bucket]
            change = torch._foreach_sub([weights[index] for index in bucket], averaged)
            torch._foreach_mul_(change, share)
            torch._foreach_add_(averaged, change)
        self._num_updates += applied

    @contextmanager
    def swapped(self, model: nn.Module) -> Iterator[None]:
        """Context manager in which `model` holds the averaged weights; then its own, bit-equal.

        Temporarily needs the memory of another copy of the weights. Tensors keep their addresses,
        so that compiled code and captured graphs keep working.

        Raises:
            ModelError: `model` has other trainable weights than the averaged model, or is already
                swapped.
        """
        if self._is_swapped:
            raise ModelError(
                "the model holds the averaged weights already",
                where="WeightEma.swapped",
                rule="`swapped` does not nest",
                remedy="leave the outer `swapped` first",
            )
        weights = _parts(self._same_weights(model))
        kept = [weight.detach().clone() for weight in weights]
        self._is_swapped = True
        try:
            with torch.no_grad():
                torch._foreach_copy_(weights, _parts(self._averages.values()))
            yield
        finally:
            with torch.no_grad():
                torch._foreach_copy_(weights, kept)
            self._is_swapped = False

    def state_dict(self) -> dict[str, Any]:
        return {
            "kind": "ema",
            "decay": self.decay,
            "num_updates": self._num_updates,
            "weights": dict(self._averages),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores averages and count. The current decay stays that of the recipe.

        Raises:
            CheckpointError: no average was kept, or it is of another model.
        """
        _same_kind("ema", state)
        wrong = _differing(self._averages, state["weights"])
        if wrong:
            raise CheckpointError(
                f"the averaged weights in the checkpoint are of another model: {len(wrong)} differ",
                where=first_few(wrong),
                rule="a resume averages the same weights, by name and shape",
                remedy="keep the model and its frozen parameters as they were",
            )
        with torch.no_grad():
            for name, average in self._averages.items():
                average.copy_(state["weights"][name])
            self._num_updates.copy_(state["num_updates"])

    def _same_weights(self, model: nn.Module) -> list[Tensor]:
        weights: dict[str, Tensor] = {**named_trainable(model)}
        wrong = _differing(self._averages, weights)
        if wrong:
            raise ModelError(
                f"the averaged weights are of another model: {len(wrong)} differ",
                where=first_few(wrong),
                rule="the trainable weights are the same, by name and shape",
                remedy="pass the model that the average was created for; freeze nothing in between",
            )
        return [weights[name] for name in self._averages]


def _parts(tensors: Iterable[Tensor]) -> list[Tensor]:
    """The local shards of the tensors: an average needs no others."""
    with torch.no_grad():
        return [t.to_local() if hasattr(t, "to_local") else t for t in tensors]


def _differing(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> list[str]:
    return [
        name
        for name in sorted(ours.keys() | theirs.keys())
        if name not in ours or name not in theirs or ours[name].shape != theirs[name].shape
    ]


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _buckets(tensors: list[Tensor]) -> list[list[int]]:
    buckets: list[list[int]] = []
    room = 0
    for index, tensor in enumerate(tensors):
        size = tensor.numel() * tensor.element_size()
        if not buckets or size > room:
            buckets.append([])
            room = BUCKET_BYTES
        buckets[-1].append(index)
        room -= size
    return buckets


def _same_kind(kind: str, state: Mapping[str, Any]) -> None:
    if state["kind"] != kind:
        raise CheckpointError(
            f"the checkpoint holds an average of kind '{state['kind']}', this run '{kind}'",
            where="average",
            rule="a resume keeps the average of the weights",
            remedy="resume with the ema section of that run",
        )
