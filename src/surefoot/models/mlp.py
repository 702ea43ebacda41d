"""A multi-layer perceptron for flat inputs. Returns logits; knows no loss."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor, nn

from surefoot.core.errors import ModelError
from surefoot.models.activations import ActivationName, activation
from surefoot.models.initialization import Initialization, initialize


@dataclass(frozen=True, kw_only=True, slots=True)
class MLPConfig:
    """Shape and style of a perceptron.

    Args:
        in_features: features per sample, over all its dims.
        hidden: width of each hidden layer; empty for a linear model.
        out_features: outputs per sample.
        activation: `relu`, `gelu`, `silu`, `tanh` or `sigmoid`.
        norm: of each hidden layer, before its activation.
        residual: hidden layers of equal input and output width add their input to their output.
        dropout: probability, after each hidden layer.
        initialization: `he` for ReLU-like activations, `xavier` for tanh-like; the output layer is
            always `xavier`, biases are 0.
    """

    in_features: int
    hidden: tuple[int, ...]
    out_features: int
    activation: ActivationName = "relu"
    norm: Literal["none", "layernorm", "batchnorm"] = "none"
    residual: bool = False
    dropout: float = 0.0
    initialization: Initialization = "he"

    def __post_init__(self) -> None:
        sizes = (self.in_features, *self.hidden, self.out_features)
        if min(sizes) < 1 or not 0.0 <= self.dropout < 1.0:
            raise ModelError(
                f"a perceptron cannot have widths {list(sizes)} and dropout {self.dropout}",
                where="MLPConfig",
                rule="every width is positive, dropout is in [0, 1)",
                remedy="change the widths or the dropout",
            )


class HiddenLayer(nn.Module):
    """Linear, norm, activation, dropout; plus the input if `residual`."""

    def __init__(self, config: MLPConfig, in_features: int, out_features: int) -> None:
        super().__init__()
        self.residual = config.residual and in_features == out_features
        self.linear = nn.Linear(in_features, out_features)
        self.norm: nn.Module = nn.Identity()
        if config.norm == "layernorm":
            self.norm = nn.LayerNorm(out_features)
        elif config.norm == "batchnorm":
            self.norm = nn.BatchNorm1d(out_features)
        self.activation = activation(config.activation)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, hidden: Tensor) -> Tensor:
        """[B, in_features] to [B, out_features]."""
        output = self.dropout(self.activation(self.norm(self.linear(hidden))))
        out: Tensor = hidden + output if self.residual else output
        return out


class MLP(nn.Module):
    """A perceptron: flat features to logits or values."""

    def __init__(self, config: MLPConfig) -> None:
        super().__init__()
        self.config = config
        widths = (config.in_features, *config.hidden)
        self.blocks = nn.ModuleList(HiddenLayer(config, *pair) for pair in pairwise(widths))
        self.head = nn.Linear(widths[-1], config.out_features)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draws all weights from torch's global random stream."""
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear):
                rule = "xavier" if name == "head" else self.config.initialization
                initialize(module.weight, rule)
                nn.init.zeros_(module.bias)
            elif isinstance(module, (nn.LayerNorm, nn.BatchNorm1d)):
                module.reset_parameters()

    def forward(self, inputs: Tensor) -> Tensor:
        """Outputs of a batch.

        Args:
            inputs: [B, ...] with `in_features` features per sample; further dims are flattened.

        Returns:
            [B, out_features].

        Raises:
            ModelError: the number of features is wrong.
        """
        if inputs.dim() < 2 or inputs.shape[1:].numel() != self.config.in_features:
            raise ModelError(
                f"inputs have shape {list(inputs.shape)}",
                where="MLP.forward",
                rule=f"[batch, ...] with {self.config.in_features} features per sample",
                remedy="correct the data, or in_features",
            )
        hidden = inputs.flatten(1)
        for block in self.blocks:
            hidden = block(hidden)
        out: Tensor = self.head(hidden)
        return out
