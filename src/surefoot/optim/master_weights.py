"""Float32 master copies of bf16 weights, so that small updates are not lost.

In bf16 the number below 1.0 is 0.996: a hundred updates of -6e-4 leave 1.0 unchanged. The optimizer
therefore steps float32 copies, which are then rounded into the model. Float32 weights are not
touched; fp16 weights, whose gradients underflow, are refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Literal

import torch
from torch import Tensor, nn

from surefoot.core.errors import ModelError
from surefoot.optim.ledger import ParameterLedger, first_few

LowPrecisionWeights = Literal["refuse", "master"]
"""`refuse`: bf16 weights are an error. `master`: they get float32 copies (and moments)."""


class MasterWeights:
    """Pairs of low-precision weights and float32 copies; none for a float32 model.

    Args:
        model_weights: the weights that the model computes with.
        masters: their float32 copies, which the optimizer steps.
    """

    def __init__(
        self, model_weights: Sequence[nn.Parameter] = (), masters: Sequence[nn.Parameter] = ()
    ) -> None:
        self._model_weights: list[Tensor] = list(model_weights)
        self._masters: list[Tensor] = list(masters)
        self._model_weight_of = dict(zip(map(id, masters), model_weights, strict=True))

    def model_weight(self, stepped: Tensor) -> Tensor:
        """The model's weight for a tensor that the optimizer steps; itself if it has no copy."""
        return self._model_weight_of.get(id(stepped), stepped)

    def is_master(self, stepped: Tensor) -> bool:
        """Whether the optimizer steps a copy here."""
        return id(stepped) in self._model_weight_of

    def take_gradients(self) -> None:
        """Sets each copy's gradient to its weight's, converted to float32."""
        for weight, master in zip(self._model_weights, self._masters, strict=True):
            master.grad = None if weight.grad is None else weight.grad.float()

    def drop_gradients(self) -> None:
        """Frees the converted gradients."""
        for master in self._masters:
            master.grad = None

    @torch.no_grad()
    def publish(self) -> None:
        """Rounds the copies into the model. An unchanged copy rounds to the same value."""
        if self._masters:
            torch._foreach_copy_(self._model_weights, self._masters)


NO_MASTERS: Final = MasterWeights()
"""For a model whose weights are all float32."""


def master_groups(
    ledger: ParameterLedger, choice: LowPrecisionWeights
) -> tuple[list[dict[str, Any]], MasterWeights]:
    """The ledger's groups for an optimizer, with float32 copies in place of bf16 weights.

    Raises:
        ModelError: there are fp16 weights, or bf16 weights that are refused.
    """
    _refuse(ledger, torch.float16, "their gradients underflow below 6e-8", "model.float()")
    if choice == "refuse":
        _refuse(
            ledger,
            torch.bfloat16,
            "updates below 1/256 of a weight are lost to rounding",
            "model.float() and precision bf16 (autocast), or low_precision_weights='master'",
        )
    groups = ledger.groups()
    model_weights: list[nn.Parameter] = []
    masters: list[nn.Parameter] = []
    for group in groups:
        for index, weight in enumerate(group["params"]):
            if weight.dtype == torch.bfloat16:
                master = nn.Parameter(weight.detach().float())
                group["params"][index] = master
                model_weights.append(weight)
                masters.append(master)
    return groups, MasterWeights(model_weights, masters)


def _refuse(ledger: ParameterLedger, dtype: torch.dtype, why: str, remedy: str) -> None:
    name = str(dtype).removeprefix("torch.")
    found = [row.name for row in ledger.rows if row.dtype == name]
    if found:
        raise ModelError(
            f"{len(found)} trainable weights are {name}: {why}",
            where=first_few(found),
            rule="weights are float32, or bf16 with float32 copies",
            remedy=remedy,
        )
