"""Activations by name. SwiGLU is not elementwise and is part of the decoder."""

from __future__ import annotations

from typing import Literal

from torch import nn

ActivationName = Literal["relu", "gelu", "silu", "tanh", "sigmoid"]

_ACTIVATIONS: dict[str, type[nn.Module]] = {
    "relu": nn.ReLU,
    "gelu": nn.GELU,
    "silu": nn.SiLU,
    "tanh": nn.Tanh,
    "sigmoid": nn.Sigmoid,
}


def activation(name: ActivationName) -> nn.Module:
    """A new activation module.

    `gelu` is `x * Phi(x)`, exact by erf, minimum -0.16997 (Hendrycks & Gimpel 2016); `silu` is
    `x * sigmoid(x)`, least value -0.27846 (Elfwing et al. 2017). `sigmoid` has slopes of at most
    0.25: ten layers of it scale a gradient by less than 1e-6.
    """
    return _ACTIVATIONS[name]()
