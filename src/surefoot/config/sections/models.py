"""Which model. The fields of a kind are those of its configuration in `surefoot.models`.

Never builds one and holds no default that a model does not state itself.
"""

from __future__ import annotations

from abc import ABC
from typing import Annotated, Any, Literal

from pydantic import Field

from surefoot.config.fields import (
    Arguments,
    AsHeads,
    BelowOne,
    FromData,
    Names,
    Positive,
    Section,
    Target,
    Text,
    Whole,
    Wholes,
)

ActivationName = Literal["relu", "gelu", "silu", "tanh", "sigmoid"]


class ModelBase(Section, ABC):
    """What all models share. Abstract: name one of the kinds."""

    initial_weights: Text = "none"
    """File or run folder to start from, or `none` for a fresh start."""
    frozen: Names = ()
    """Shell patterns of parameter names that are not trained."""

    def architecture(self) -> dict[str, Any]:
        """The fields that the model's own configuration takes."""
        return self.model_dump(exclude={"kind", *ModelBase.model_fields})


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

    def architecture(self) -> dict[str, Any]:
        """The fields of `GPTConfig`; sizes may still be `from-data`."""
        fields = super().architecture()
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
    """A perceptron."""

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
    """A module of the user's own."""

    kind: Literal["custom"]
    target: Target
    arguments: Arguments = Field(default_factory=dict)


ModelSection = Annotated[
    GPTSection | ResNetSection | MLPSection | CustomModelSection, Field(discriminator="kind")
]
