"""Weight initialization by published formulas, from torch's global random stream."""

from __future__ import annotations

from typing import Literal

from torch import Tensor, nn

Initialization = Literal["he", "xavier"]


def initialize(weight: Tensor, rule: Initialization) -> None:
    """Fills `weight` [out, in] or [out, in, kernel...] in place.

    `he`: normal with variance `2 / fan_in`, which keeps the variance through ReLU-like activations
    (He et al. 2015). `xavier`: normal with variance `2 / (fan_in + fan_out)`, for tanh-like ones
    (Glorot & Bengio 2010).
    """
    if rule == "he":
        nn.init.kaiming_normal_(weight, mode="fan_in", nonlinearity="relu")
    else:
        nn.init.xavier_normal_(weight)
