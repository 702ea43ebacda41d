"""Metrics as (numerator, denominator) sums, added over batches and ranks, divided once at the end.

Never an average of averages: a short last batch or an uneven rank changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from surefoot.core.errors import ModelError
from surefoot.tasks.constants import widest
from surefoot.tasks.losses import IGNORE_INDEX
from surefoot.tasks.task import MetricSums

LOSS_TERM = "loss/"
"""Prefix of the terms of a loss that has several."""


def correct_sum(scores: Tensor, labels: Tensor, *, top_k: int = 1) -> Tensor:
    """How many counted items have their label among the `top_k` highest scores.

    Args:
        scores: [N, C]; logits or probabilities.
        labels: [N]; `IGNORE_INDEX` never counts as correct.

    Returns:
        0-dim int64.
    """
    if top_k == 1:
        hits = scores.argmax(dim=-1) == labels
    else:
        hits = (scores.topk(top_k, dim=-1).indices == labels.unsqueeze(-1)).any(dim=-1)
    return (hits & (labels != IGNORE_INDEX)).sum()


class MetricTotals:
    """Running totals of metric sums, kept on the device; reading them is what waits for it.

    Totals are float64 where the device has it, so that the split into batches does not show.
    """

    def __init__(self) -> None:
        self._totals: dict[str, Tensor] = {}

    def add(self, sums: MetricSums) -> None:
        """Add the sums of one batch.

        Raises:
            ModelError: the names differ from those of the batches before.
        """
        if self._totals and self._totals.keys() != sums.keys():
            raise ModelError(
                f"metrics {sorted(sums)} follow metrics {sorted(self._totals)}",
                rule="every batch of an evaluation has the same metrics",
            )
        for name, (numerator, denominator) in sums.items():
            pair = torch.stack((_wide(numerator), _wide(denominator, numerator.device)))
            before = self._totals.get(name)
            self._totals[name] = pair if before is None else before + pair

    @property
    def names(self) -> tuple[str, ...]:
        """Names in the order of the rows of `stacked`."""
        return tuple(self._totals)

    def stacked(self) -> Tensor:
        """[M, 2] of (numerator, denominator), in the order of `names`."""
        return torch.stack(tuple(self._totals.values()))

    def pairs(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Name to (numerator, denominator), as they stand."""
        return {name: (pair[0], pair[1]) for name, pair in self._totals.items()}

    @classmethod
    def of(cls, names: Sequence[str], stacked: Tensor) -> MetricTotals:
        """The totals that `stacked` stands for."""
        totals = cls()
        totals._totals = dict(zip(names, stacked.unbind(), strict=True))
        return totals

    def combine(self, reduce: Callable[[Tensor], Tensor]) -> None:
        """Replaces the totals by what `reduce` makes of them, such as the sums over ranks.

        `reduce` is given rows of (numerator, denominator) in the order of the names, which is the
        same on all ranks whatever the order in which their metrics were computed.
        """
        names = sorted(self._totals)
        rows = reduce(torch.stack([self._totals[name] for name in names])).unbind()
        reduced = dict(zip(names, rows, strict=True))
        self._totals = {name: reduced[name] for name in self._totals}

    def denominator(self, name: str) -> float:
        """Items that metric `name` was averaged over; for `loss` of several terms, the first's."""
        if name == "loss" and name not in self._totals:
            name = next(term for term in self._totals if term.startswith(LOSS_TERM))
        return float(self._totals[name][1])

    def ratios(self) -> dict[str, float]:
        """Name to numerator / denominator. Waits for the device once."""
        if not self._totals:
            return {}
        return ratios(dict(zip(self.names, self.stacked().tolist(), strict=True)))


def nothing_of(sums: MetricSums) -> dict[str, tuple[Tensor, float | Tensor]]:
    """The same metrics of no item: all sums are 0, whatever they were."""
    return {name: (torch.zeros_like(numerator), 0.0) for name, (numerator, _) in sums.items()}


def _wide(value: Tensor | float, device: torch.device | None = None) -> Tensor:
    place = device or (value.device if isinstance(value, Tensor) else torch.device("cpu"))
    dtype = widest(place)
    if isinstance(value, Tensor):
        return value.detach().to(place, dtype)
    return torch.full((), value, dtype=dtype, device=place)


def ratios(totals: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Divide (numerator, denominator) pairs; a denominator of 0 gives NaN: nothing was measured.

    A loss of several terms (`loss/TERM` each) also gets `loss`, the sum of its terms' means, as
    the update minimises it: a term without an item adds nothing.

    >>> ratios({"loss": (6.0, 4.0), "accuracy": (0.0, 0.0)})
    {'loss': 1.5, 'accuracy': nan}
    >>> ratios({"loss/a": (6.0, 4.0), "loss/b": (1.0, 2.0)})
    {'loss': 2.0, 'loss/a': 1.5, 'loss/b': 0.5}
    >>> ratios({"loss/a": (6.0, 4.0), "loss/b": (0.0, 0.0)})
    {'loss': 1.5, 'loss/a': 1.5, 'loss/b': nan}
    """
    values = {
        name: (numerator / denominator if denominator else float("nan"))
        for name, (numerator, denominator) in totals.items()
    }
    if any(name.startswith(LOSS_TERM) for name in values):
        measured = [
            value
            for name, value in values.items()
            if name.startswith(LOSS_TERM) and totals[name][1]
        ]
        values = {"loss": sum(measured) if measured else float("nan"), **values}
    return values
