"""Optimizer sections. Knows no parameters and no torch."""

from __future__ import annotations

from abc import ABC
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, Tag

from surefoot.config.fields import (
    BelowOne,
    NotNegativeNumber,
    Positive,
    Section,
    Text,
    WeightDecay,
)
from surefoot.config.sections.parts import PART_TAG, PartSection, by_kind
from surefoot.core.doors import OURS, Door

Betas = Annotated[tuple[BelowOne, BelowOne], Field(strict=False)]
Fused = Literal["auto", "on", "off"]


class GroupSection(Section):
    """Overrides for the parameters whose names match a pattern; the first match is used."""

    pattern: Text
    """Glob pattern (`*`, `?`, `[...]`) for the full parameter name."""
    lr_multiplier: NotNegativeNumber = 1.0
    weight_decay: WeightDecay = "as-optimizer"


class OptimizerBase(Section, ABC):
    """Base of all optimizer sections."""

    decay_rule: Literal["dimension", "name"] = "dimension"
    """Rule for weight decay: two dims or more, or the name and type of the module."""
    decay_embeddings: bool = True
    groups: Annotated[tuple[GroupSection, ...], Field(strict=False)] = ()
    low_precision_weights: Literal["refuse", "master"] = "refuse"
    """For bf16 weights: an error, or float32 master weights."""


class TorchOptimizerBase(OptimizerBase, ABC):
    """What optimizers of torch's share. Abstract: name one of the kinds."""

    fused: Fused = "auto"

    def hyper_parameters(self) -> dict[str, Any]:
        """What the optimizer is made with, besides its groups, rate and kernels."""
        shared = {*TorchOptimizerBase.model_fields, "kind", "lr", "weight_decay"}
        return {name: getattr(self, name) for name in type(self).model_fields if name not in shared}


class AdamWSection(TorchOptimizerBase):
    """AdamW, arXiv:1711.05101, as in torch: the decay is multiplied by the current rate.

    Peak rate: 3e-4 for the smallest and 1.5e-4 for the largest LLaMA 2, arXiv:2307.09288, section
    2.2, which also uses betas (0.9, 0.95) and weight decay 0.1. Smaller models take higher rates.
    """

    kind: Literal["adamw"] = "adamw"
    lr: Positive = 3e-4
    betas: Betas = (0.9, 0.95)
    eps: Positive = 1e-8
    weight_decay: NotNegativeNumber = 0.1


class AdamSection(TorchOptimizerBase):
    """Adam, arXiv:1412.6980. Its weight decay is an L2 term in the gradient."""

    kind: Literal["adam"]
    lr: Positive = 1e-3
    betas: Betas = (0.9, 0.999)
    eps: Positive = 1e-8
    weight_decay: NotNegativeNumber = 0.0


class SGDSection(TorchOptimizerBase):
    """Stochastic gradient descent, with momentum or Nesterov momentum."""

    kind: Literal["sgd"]
    lr: Positive
    momentum: BelowOne = 0.9
    nesterov: bool = False
    weight_decay: NotNegativeNumber = 0.0


class OwnOptimizerSection(OptimizerBase, PartSection):
    """An optimizer of the user's own or of an installed package.

    It is called with the parameter groups, each with its `lr` and `weight_decay`, and `arguments`.
    """

    door: ClassVar[Door] = Door.OPTIMIZERS
    lr: Positive
    weight_decay: NotNegativeNumber = 0.0

    def hyper_parameters(self) -> dict[str, Any]:
        """What the optimizer is made with, besides its groups."""
        return dict(self.arguments)


OptimizerSection = Annotated[
    Annotated[AdamWSection, Tag("adamw")]
    | Annotated[AdamSection, Tag("adam")]
    | Annotated[SGDSection, Tag("sgd")]
    | Annotated[OwnOptimizerSection, Tag(PART_TAG)],
    by_kind(Door.OPTIMIZERS, *OURS[Door.OPTIMIZERS]),
]
