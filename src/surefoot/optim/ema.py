"""An exponential moving average of the weights, kept on the device.

It averages trainable weights only: frozen ones never differ, and buffers (BatchNorm's running
statistics among them) are not averaged. It never changes the model but inside `swapped`, and then
puts it back bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Final

import torch
from torch import Tensor, nn

from surefoot.core.errors import CheckpointError, ModelError, RequestError
from surefoot.optim.ledger import named_trainable

BUCKET_BYTES: Final = 64 * 2**20
"""Size of the temporary memory that one averaging takes, per bucket of tensors."""


class NoAverage:
    """No average is kept; an evaluation uses the weights themselves."""

    def update(self, finite: Tensor) -> None:
        return None

    def swapped(self, model: nn.Module) -> AbstractContextManager[None]:
        return nullcontext()

    def state_dict(self) -> dict[str, Any]:
        return {"kind": "none"}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        _same_kind("none", state)


class WeightEma:
    """Averages the weights: `average += (1 - decay) * (weight - average)` after each applied update.

    It starts from the weights at its making and remembers about `1 / (1 - decay)` updates. It is kept in float32 for weights of lower
    precision. Averaged weights are evaluated with the model's own buffers: the running statistics
    of a BatchNorm are those of the raw weights.

    Args:
        model: the model whose trainable weights are averaged; each tied tensor once.
        decay: within 0 (the last weights) to 1 (exclusive).

    Raises:
        RequestError: the decay is out of range.
        ModelError: nothing is trainable.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        if not 0.0 <= decay < 1.0:
            raise RequestError(
                f"decay is {decay}",
                where="ema.decay",
                rule="0 <= decay < 1",
                remedy="0.999 remembers about 1000 updates",
            )
        self.decay = decay
        weights = named_trainable(model)
        if not weights:
            raise ModelError(
                "there is nothing to average: no parameter is trainable",
                rule="an average needs trainable weights",
                remedy="turn ema off or unfreeze a part of the model",
            )
        self._weights = list(weights.values())
        self._averages = {
            name: weight.detach().to(dtype=_wide(weight.dtype), copy=True)
            for name, weight in weights.items()
        }
        device = self._weights[0].device
        self._num_updates = torch.zeros((), dtype=torch.int64, device=device)
        self._share = torch.full((), 1.0 - decay, dtype=torch.float64).to(
            device, torch.float32 if device.type == "mps" else torch.float64
        )
        self._buckets = _buckets(list(self._averages.values()))
        self._is_swapped = False

    @property
    def num_updates(self) -> Tensor:
        """Updates averaged so far, a 0-dim int64 device tensor."""
        return self._num_updates

    @property
    def averages(self) -> Mapping[str, Tensor]:
        """Name to averaged weight, the live tensors."""
        return self._averages

    @torch.no_grad()
    def update(self, finite: Tensor) -> None:
        """Takes the current weights in, where `finite` (0-dim bool) is true; else nothing changes.

        Raises:
            ModelError: called inside `swapped`.
        """
        if self._is_swapped:
            raise ModelError(
                "the average was updated while the model holds averaged weights",
                where="WeightEma.update",
                rule="training goes on with the raw weights",
                remedy="leave `swapped` before the next update",
            )
        finite = finite.to(self._share.device)
        share = self._share * finite
        averages = list(self._averages.values())
        for bucket in self._buckets:
            averaged = [averages[i] for i in bucket]
            change = torch._foreach_sub([self._weights[i] for i in bucket], averaged)
            torch._foreach_mul_(change, share)
            torch._foreach_add_(averaged, change)
        self._num_updates += finite

    @contextmanager
    def swapped(self, model: nn.Module) -> Iterator[None]:
        """Inside, `model` holds the averaged weights; afterwards its own, bit for bit.

        Takes the memory of one more copy of the weights meanwhile. The tensors stay where they are
        in memory, so compiled code and captured graphs keep working.

        Raises:
            ModelError: `model` has other trainable weights than the averaged model.
        """
        weights = self._same_weights(model)
        kept = [weight.detach().clone() for weight in weights]
        self._is_swapped = True
        try:
            with torch.no_grad():
                torch._foreach_copy_(weights, list(self._averages.values()))
            yield
        finally:
            with torch.no_grad():
                torch._foreach_copy_(weights, kept)
            self._is_swapped = False

    def _same_weights(self, model: nn.Module) -> list[Tensor]:
        weights = named_trainable(model)
        ours = {name: tuple(a.shape) for name, a in self._averages.items()}
        theirs = {name: tuple(w.shape) for name, w in weights.items()}
        if ours != theirs:
            differing = sorted(
                name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name)
            )
            raise ModelError(
                "the averaged weights are of another model",
                where=", ".join(differing[:5]),
                rule="names and shapes of the trainable weights are the same",
                remedy="pass the model that the average was made for; freeze nothing in between",
            )
        return [weights[name] for name in self._averages]

    def state_dict(self) -> dict[str, Any]:
        return {
            "kind": "ema",
            "decay": self.decay,
            "num_updates": self._num_updates,
            "weights": dict(self._averages),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores averages and count; the decay is the recipe's and may have changed.

        Raises:
            CheckpointError: no average was kept, or it is of another model.
        """
        _same_kind("ema", state)
        theirs = state["weights"]
        wrong = [
            name
            for name in sorted(self._averages.keys() | theirs.keys())
            if name not in theirs
            or name not in self._averages
            or theirs[name].shape != self._averages[name].shape
        ]
        if wrong:
            raise CheckpointError(
                f"the averaged weights in the checkpoint are of another model: {len(wrong)} differ",
                where=", ".join(wrong[:5]),
                rule="a resume averages the same weights, by name and shape",
                remedy="keep the model and what is frozen as they were",
            )
        with torch.no_grad():
            for name, average in self._averages.items():
                average.copy_(theirs[name])
            self._num_updates.copy_(state["num_updates"])


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
