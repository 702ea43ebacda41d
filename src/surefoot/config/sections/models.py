"""Model sections. The fields of a kind are those of its configuration in `surefoot.models`.

Builds nothing and defines no default that a model does not define itself.
"""

from __future__ import annotations

from abc import ABC
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from surefoot.config.fields import (
    Arguments,
    AsDense,
    AsHeads,
    BelowOne,
    Capacity,
    FromData,
    Names,
    NotNegative,
    NotNegativeNumber,
    Positive,
    Section,
    Target,
    Text,
    Whole,
    Wholes,
)

ActivationName = Literal["relu", "gelu", "silu", "tanh", "sigmoid"]


class ModelBase(Section, ABC):
    """Base of all model sections."""

    initial_weights: Text = "none"
    """File or run folder to start from, or `none` for random initialization."""
    frozen: Names = ()
    """Glob patterns of parameter names that are not trained."""

    def architecture(self) -> dict[str, Any]:
        """The fields of the model's own configuration."""
        return self.model_dump(exclude={"kind", *ModelBase.model_fields})


class ExpertsSection(Section):
    """Mixture of experts: routed feed-forward layers of a decoder."""

    num_experts: Whole
    experts_per_token: Whole = 2
    shared_experts: NotNegative = 0
    """Number of experts that process every token, in addition to the routed ones."""
    every: Whole = 1
    """Every n-th layer is routed, starting with the n-th."""
    expert_dim: AsDense = "as-dense"
    capacity_factor: Capacity = "dropless"
    """Capacity of an expert, relative to the even load of a micro-batch; excess is dropped."""
    scores: Literal["softmax", "sigmoid"] = "softmax"
    gates: Literal["normalized", "as-scored"] = "normalized"
    balance: Literal["loss", "bias", "none"] = "loss"
    """What balances the load: a term of the loss, or a bias that moves after each update."""
    balance_weight: NotNegativeNumber = 0.01
    bias_rate: NotNegativeNumber = 0.001
    z_weight: NotNegativeNumber = 0.001


def _section_or_none(value: object) -> object:
    # Parsed here, so that errors name the section and not the union.
    if value == "none" or isinstance(value, ExpertsSection):
        return value
    return ExpertsSection.model_validate(value)


Experts = Annotated[ExpertsSection | Literal["none"], BeforeValidator(_section_or_none)]


class GPTSection(ModelBase):
    """A decoder, in the style of GPT-2 or of Llama."""

    kind: Literal["gpt"]
    vocabulary_size: FromData = "from-data"
    sequence_length: FromData = "from-data"
    num_layers: Whole
    num_heads: Whole
    num_kv_heads: AsHeads = "as-heads"
    embedding_dim: Whole
    feedforward_dim: Whole
    norm: Literal["layernorm", "rmsnorm"] = "rmsnorm"
    activation: Literal["gelu", "swiglu"] = "swiglu"
    positions: Literal["learned", "rope"] = "rope"
    tied: bool = True
    dropout: BelowOne = 0.0
    bias: bool = False
    norm_epsilon: Positive = 1e-5
    rope_base: Positive = 10000.0
    experts: Experts = "none"
    """Routed experts in place of feed-forward layers."""

    def architecture(self) -> dict[str, Any]:
        """The fields of `GPTConfig`; sizes may still be `from-data`."""
        fields = super().architecture()
        if self.experts == "none":
            del fields["experts"]
        if self.num_kv_heads == "as-heads":
            fields["num_kv_heads"] = self.num_heads
        return fields


class ResNetSection(ModelBase):
    """A residual network for images."""

    kind: Literal["resnet"]
    in_channels: FromData = "from-data"
    num_classes: FromData = "from-data"
    stem: Literal["small", "large"] = "small"
    block: Literal["basic", "bottleneck"] = "basic"
    widths: Annotated[tuple[Whole, ...], Field(strict=False, min_length=1)] = (32, 64, 128)
    blocks_per_stage: Wholes = 2
    activation: ActivationName = "relu"
    dropout: BelowOne = 0.0


class MLPSection(ModelBase):
    """A multi-layer perceptron."""

    kind: Literal["mlp"]
    in_features: FromData = "from-data"
    hidden: Annotated[tuple[Whole, ...], Field(strict=False)]
    out_features: FromData = "from-data"
    activation: ActivationName = "relu"
    norm: Literal["none", "layernorm", "batchnorm"] = "none"
    residual: bool = False
    dropout: BelowOne = 0.0
    initialization: Literal["he", "xavier"] = "he"


class CustomModelSection(ModelBase):
    """A user-defined module."""

    kind: Literal["custom"]
    target: Target
    arguments: Arguments = Field(default_factory=dict)


ModelSection = Annotated[
    GPTSection | ResNetSection | MLPSection | CustomModelSection, Field(discriminator="kind")
]
