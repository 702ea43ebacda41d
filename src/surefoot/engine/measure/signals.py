"""Further numbers of some updates: those of sampled windows, and the norm of the weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from surefoot.engine.in_flight import PlainSignals, Sent
from surefoot.engine.measure.sampling import Sampling


class MeasuredSignals:
    """`PlainSignals`, with further measures where they are due.

    Args:
        weight_norm: measures the global weight norm, a 0-dim device tensor.
        weight_norm_every_steps: it is sent on the updates that complete a multiple of this.
        sampling: further numbers of sampled windows; None for none.
    """

    def __init__(
        self,
        weight_norm: Callable[[], Tensor],
        weight_norm_every_steps: int,
        sampling: Sampling | None = None,
    ) -> None:
        self._weight_norm = weight_norm
        self._weight_norm_every_steps = weight_norm_every_steps
        self._sampling = sampling
        self._signals = PlainSignals()
        self._late_signals = PlainSignals()

    def send(self, numbers: Mapping[str, Tensor | float], limit: float) -> Sent:
        if self._sampling is not None and self._sampling.is_on:
            numbers = {**numbers, **self._sampling.before_step()}
        return self._signals.send(numbers, limit)

    def after_step(self, sent: Sent, step: int) -> Sent:
        sampling = self._sampling
        is_sampled = sampling is not None and sampling.is_on
        late = sampling.after_step() if sampling is not None and is_sampled else {}
        if (step + 1) % self._weight_norm_every_steps == 0:
            late["weight_norm"] = self._weight_norm()
        if not (late or is_sampled):
            return sent
        return _Measured(sent, self._late_signals.send(late) if late else None, is_sampled)


class _Measured(Sent):
    """What was sent before the weights moved, and after."""

    def __init__(self, sent: Sent, late: Sent | None, is_sampled: bool) -> None:
        self.limit, self.at_once, self.is_sampled = sent.limit, sent.at_once, is_sampled
        self._parts = [sent] if late is None else [sent, late]

    def has_arrived(self) -> bool:
        return all(part.has_arrived() for part in self._parts)

    def read(self) -> dict[str, float]:
        return {name: number for part in self._parts for name, number in part.read().items()}
