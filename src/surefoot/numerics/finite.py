"""The finite flag of an update, on the device.

It never waits for the device and never looks at single elements: a gradient that is not finite
makes its norm so.
"""

from __future__ import annotations

from torch import Tensor


def both_finite(first: Tensor, second: Tensor) -> Tensor:
    """Whether two scalars are finite: `x - x` is 0 for a finite x, and NaN for any other.

    Three kernels, where `isfinite` of both takes nine: this runs in every update.

    Args:
        first: 0-dim, floating point.
        second: 0-dim, floating point, on the same device.

    Returns:
        0-dim bool tensor.
    """
    return (first - first) == (second - second)
