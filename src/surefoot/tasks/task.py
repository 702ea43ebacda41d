"""The contract of a task, and the adapter for a plain loss function.

A task gives sums and weights. It never divides: the engine divides once, by the weight of the
whole window over all ranks, which is what makes unequal micro-batches exact.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from surefoot.core.batches import fetched_samples
from surefoot.core.errors import DataError, ModelError

Weight = float | dict[str, float]
"""Loss-bearing items of a batch; by term where a loss has several."""
LossSum = Tensor | dict[str, Tensor]
"""0-dim sum of the loss over a batch; by term where a loss has several."""
MetricSums = dict[str, tuple[Tensor, float | Tensor]]
"""Metric name to (numerator, denominator), both sums over a batch."""
Direction = Literal["min", "max"]


@runtime_checkable
class Task(Protocol):
    """What the engine needs to know about the meaning of a loss.

    Any object with these members is a task; ours are, and so is `FunctionTask`.

    >>> isinstance(FunctionTask(lambda model, batch: model(batch).sum()), Task)
    True
    """

    @property
    def unit(self) -> str:
        """What a weight counts: `tokens`, `samples` or `elements`."""

    @property
    def deciding_metric(self) -> tuple[str, Direction]:
        """The metric that tells the best checkpoint, and which way is better."""

    def weight(self, batch: Any) -> Weight:
        """Loss-bearing items of a batch that lies on the CPU; needs no model.

        It also checks shapes and ranges, because here a look at the values costs no device wait.

        Raises:
            DataError: a shape or value is wrong; `batch_position` holds the row at fault.
        """

    def loss_sum(self, model: nn.Module, batch: Any) -> LossSum:
        """Sum of the loss over the batch: 0-dim, float32 or float64, no device wait."""

    def metric_sums(self, model: nn.Module, batch: Any) -> MetricSums:
        """Sums for evaluation. Holds `loss`, or `loss/TERM` for each term of several."""


def main_weight(weights: Mapping[str, float]) -> float:
    """The weight that counts where a loss has several terms: that of `loss`, or all added up.

    A term called `loss` is the loss proper; others beside it (a router's) are trained with it.
    """
    return weights.get("loss", sum(weights.values()))


def split_dependence(task: Any) -> Mapping[str, str]:
    """Terms of a task's loss that are another loss under another split into micro-batches or ranks,
    with what they depend on: those that it, or the task that it wraps, declares."""
    declared: Mapping[str, str] | None = getattr(task, "depends_on_split", None)
    if declared is not None:
        return declared
    return split_dependence(task.task) if hasattr(task, "task") else {}


def count_samples(batch: Any) -> float:
    """Samples in a batch: as many as were fetched for it; else what its shapes say.

    The shapes are those of its tensors (lists count by their length): where nobody has counted, all
    first dimensions must be the same number. Where samples were counted and every first dimension
    is another number, the batch may be one of batches: that is refused, too.

    Raises:
        DataError: the batch holds nothing that can be counted, or its shapes leave it open.
    """
    fetched = fetched_samples()
    if fetched is not None and any(shape[0] == fetched for shape in _shapes(batch)):
        return float(fetched)
    shapes = list(_shapes(batch))
    sizes = sorted({int(shape[0]) for shape in shapes})
    if fetched is not None:
        if len(sizes) == 1 and sizes[0] != fetched and not _stand_second(shapes, fetched):
            raise _uncounted(
                f"{fetched} sample(s) were fetched, and every tensor of the batch begins with "
                f"{sizes[0]}"
            )
        return float(fetched)
    if not sizes:
        raise _uncounted(f"cannot count the samples of a {type(batch).__name__}")
    if len(sizes) > 1:
        raise _uncounted(f"the tensors of the batch begin with {', '.join(map(str, sizes))}")
    return float(sizes[0])


def leading_size(batch: Any) -> int:
    """First dimension of the first tensor of a batch, or the length of its first list; 0 if none.

    For statistics; what a loss is divided by is counted (see `count_samples`).
    """
    return next((shape[0] for shape in _shapes(batch)), 0)


def leading_sizes(batch: Any) -> set[int]:
    """First dimensions of all tensors (and lists) of a batch that have one."""
    return {int(shape[0]) for shape in _shapes(batch)}


def _uncounted(what: str) -> DataError:
    return DataError(
        what,
        where="the batch",
        rule="a loss without a weight_fn of its own is summed over samples, and divided by their "
        "number",
        remedy="say what the loss is summed over: FunctionTask(loss, weight_fn), with "
        "weight_fn(batch) -> number of items",
    )


def _stand_second(shapes: Sequence[Sequence[int]], count: int) -> bool:
    """Whether samples lie along the second dimension, as where time comes first."""
    return count > 1 and any(len(shape) > 1 and shape[1] == count for shape in shapes)


def _shapes(value: Any) -> Iterator[Sequence[int]]:
    """The shapes of what a batch holds, in order; scalars have none."""
    if isinstance(value, Tensor):
        if value.dim():
            yield value.shape
        return
    # Sequences first: to ask whether a value is a mapping is dear.
    if isinstance(value, (tuple, list)):
        if value and isinstance(value[0], (str, bytes, int, float)):
            yield (len(value),)
            return
        parts = list(value)
    elif isinstance(value, Mapping):
        parts = list(value.values())
    elif is_dataclass(value) and not isinstance(value, type):
        parts = [getattr(value, entry.name) for entry in fields(value)]
    else:
        return
    for part in parts:
        yield from _shapes(part)


@dataclass(frozen=True, eq=False)
class FunctionTask:
    """A task made of plain functions.

    Args:
        loss_fn: `(model, batch) -> sum`: the loss **summed** (not averaged) over the items that
            `weight_fn` counts; or a dict of such sums, one a term.
        weight_fn: `(batch) -> float`, or a dict with the same term names; sees the CPU batch.
            Without one the weight is the number of samples that were fetched, whatever the layout
            of the batch; a loss that is summed over something else (tokens, nodes) must say so.
        metrics: name to `(model, batch) -> (numerator, denominator)`, used in evaluation only.
        unit: what the weight counts: `tokens`, `samples` or `elements`.
        deciding_metric: metric that tells the best checkpoint, and `min` or `max`.
        depends_on_split: terms of the loss that do not add up over items (such as a product of two
            means over the batch), with what they depend on, for the record.

    >>> def squares(model, batch):
    ...     inputs, targets = batch
    ...     return ((model(inputs) - targets) ** 2).sum()
    >>> task = FunctionTask(squares)
    >>> float(task.loss_sum(nn.Identity(), (torch.ones(4, 1), torch.zeros(4, 1))))
    4.0
    """

    loss_fn: Callable[[nn.Module, Any], LossSum]
    weight_fn: Callable[[Any], Weight] = count_samples
    metrics: Mapping[str, Callable[[nn.Module, Any], tuple[Tensor, float | Tensor]]] = field(
        default_factory=dict
    )
    unit: str = "samples"
    deciding_metric: tuple[str, Direction] = ("loss", "min")
    depends_on_split: Mapping[str, str] = field(default_factory=dict)

    def weight(self, batch: Any) -> Weight:
        """Weight of the batch, as `weight_fn` gives it.

        Raises:
            DataError: a weight is negative or not finite.
        """
        weight = self.weight_fn(batch)
        if isinstance(weight, Mapping):
            return {name: _checked_weight(value, name) for name, value in weight.items()}
        return _checked_weight(weight, "")

    def loss_sum(self, model: nn.Module, batch: Any) -> LossSum:
        """Loss sum of the batch, as `loss_fn` gives it; half precision is widened to float32.

        Raises:
            ModelError: `loss_fn` did not return one scalar (or a dict of scalars).
        """
        loss = self.loss_fn(model, batch)
        if isinstance(loss, Mapping):
            return {name: _checked_scalar(value, name) for name, value in loss.items()}
        return _checked_scalar(loss, "")

    @torch.no_grad()
    def metric_sums(self, model: nn.Module, batch: Any) -> MetricSums:
        """Loss and own metrics as (numerator, denominator).

        Raises:
            ModelError: the terms of the loss and of the weight have different names, or a metric
                is called `loss`.
        """
        sums = loss_terms(self.loss_sum(model, batch), self.weight(batch))
        for name, metric in self.metrics.items():
            if name in sums:
                raise ModelError(
                    f"a metric may not be called {name!r}",
                    rule="that name belongs to the loss",
                    remedy="rename the metric",
                )
            sums[name] = checked_metric(name, metric(model, batch))
        return sums


def checked_metric(name: str, found: Any) -> tuple[Tensor, float | Tensor]:
    """What a metric of the user's own returned, if it is a pair of sums.

    Raises:
        ModelError: it is anything else, such as a mean.
    """
    shown = type(found).__name__
    if isinstance(found, (tuple, list)) and len(found) == 2 and isinstance(found[0], Tensor):
        shapes = [list(part.shape) for part in found if isinstance(part, Tensor)]
        if not any(shapes):
            return found[0], found[1]
        shown = f"pair with tensors of shape {shapes}"
    raise ModelError(
        f"metric {name!r} returned a {shown}",
        rule="a metric is (numerator, denominator), the first a tensor, both sums over the batch",
        remedy="return for example (correct.sum(), len(correct)); the division comes at the end",
    )


def loss_terms(loss: LossSum, weight: Weight) -> MetricSums:
    """Pair loss sums with their weights: `loss`, or `loss/TERM` for each of several terms.

    Raises:
        ModelError: loss and weight do not have the same terms.
    """
    if isinstance(loss, Mapping) and isinstance(weight, Mapping) and loss.keys() == weight.keys():
        return {f"loss/{name}": (loss[name], weight[name]) for name in loss}
    if isinstance(loss, Mapping) or isinstance(weight, Mapping):
        raise ModelError(
            f"loss terms {_terms(loss)} do not match weight terms {_terms(weight)}",
            rule="every term of the loss has a weight of the same name",
            remedy="let weight_fn return a dict with the keys that loss_fn returns",
        )
    return {"loss": (loss, weight)}


def _terms(value: LossSum | Weight) -> list[str] | str:
    return sorted(value) if isinstance(value, Mapping) else "(one unnamed)"


def _checked_weight(value: Any, term: str) -> float:
    number = float(value)
    if not 0.0 <= number < float("inf"):
        raise DataError(
            f"weight_fn returned {number}",
            where=f"term {term!r}" if term else "",
            rule="a weight is a finite number that is not negative",
        )
    return number


def _checked_scalar(value: Any, term: str) -> Tensor:
    place = f"term {term!r}" if term else ""
    if not isinstance(value, Tensor):
        raise ModelError(
            f"loss_fn returned a {type(value).__name__}",
            where=place,
            rule="a loss is a 0-dim tensor, or a dict of them",
            remedy="return the sum as torch gives it, without .item()",
        )
    if value.dim() != 0:
        raise ModelError(
            f"loss_fn returned a tensor of shape {list(value.shape)}",
            where=place,
            rule="a loss is one scalar: the sum over the batch",
            remedy='use reduction="sum", or call .sum()',
        )
    if not value.is_floating_point():
        raise ModelError(
            f"loss_fn returned a tensor of {value.dtype}",
            where=place,
            rule="a loss is a floating-point number",
        )
    return value.float() if value.dtype in (torch.float16, torch.bfloat16) else value
