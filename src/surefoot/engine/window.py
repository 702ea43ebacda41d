"""A window: the micro-batches of one update on one rank, complete before the first forward.

It never looks at a model, and it never splits or reorders what the loader planned.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from surefoot.data.batch import MicroBatch
from surefoot.data.order import Cursor


class Window(NamedTuple):
    """The micro-batches of one update on this rank."""

    micro_batches: tuple[MicroBatch, ...]
    weights: Mapping[str, float]
    """Loss-bearing items of each loss term on this rank, summed over the micro-batches."""
    samples: int
    """Samples of the window over the data-parallel ranks."""
    sample_ids: tuple[int, ...]
    cursor_after: Any
    """Where the data stands once this window is consumed."""
    data_seconds: float = 0.0
    epoch: int = 0
    """Of the last micro-batch; that of `cursor_after` is the next one's where this one ends it."""


def sum_weights(micro_batches: Sequence[MicroBatch]) -> dict[str, float]:
    """Adds the weights of each loss term over the micro-batches, in their order."""
    weights = dict(micro_batches[0].weights)
    for micro_batch in micro_batches[1:]:
        for term, weight in micro_batch.weights.items():
            weights[term] += weight
    return weights


def gather_window(micro_batches: Sequence[MicroBatch], data_seconds: float = 0.0) -> Window:
    """Makes one window of the given micro-batches (at least one)."""
    if len(micro_batches) == 1:
        (only,) = micro_batches
        return Window(
            (only,),
            only.weights,
            only.samples,
            only.ids,
            only.cursor_after,
            data_seconds,
            only.epoch,
        )
    return Window(
        micro_batches=tuple(micro_batches),
        weights=sum_weights(micro_batches),
        samples=sum(micro_batch.samples for micro_batch in micro_batches),
        sample_ids=tuple(i for micro_batch in micro_batches for i in micro_batch.ids),
        cursor_after=micro_batches[-1].cursor_after,
        data_seconds=data_seconds,
        epoch=micro_batches[-1].epoch,
    )


def windows(micro_batches: Iterator[MicroBatch]) -> Iterator[Window]:
    """Groups planned micro-batches into windows, timing the wait for data.

    A stream that ends in the middle of a window yields that short window: its denominator is its
    own weight, so its gradient is right.
    """
    gathered: list[MicroBatch] = []
    waited = 0.0
    while True:
        asked = time.perf_counter()
        micro_batch = next(micro_batches, None)
        waited += time.perf_counter() - asked
        if micro_batch is not None:
            gathered.append(micro_batch)
        if gathered and (micro_batch is None or micro_batch.ends_window):
            yield gather_window(gathered, waited)
            gathered, waited = [], 0.0
        if micro_batch is None:
            return


def over_ranks(
    windows: Iterator[Window], samples_per_epoch: int, cursor: Cursor
) -> Iterator[Window]:
    """The same windows, with the samples of all ranks counted: the plan moves all of them alike."""
    for window in windows:
        after: Cursor = window.cursor_after
        crossed = after.epoch > cursor.epoch
        samples = (samples_per_epoch if crossed else after.position) - cursor.position
        cursor = after
        yield window._replace(samples=samples)


def leaving_out(
    windows: Iterator[Window], first: int, is_left_out: Callable[[int], bool]
) -> Iterator[Window]:
    """The same windows; those that are left out carry no weight, so that they are only counted.

    Args:
        first: number of the first window, as `StepReport.window` counts.
    """
    for number, window in enumerate(windows, start=first):
        if is_left_out(number):
            window = window._replace(weights=dict.fromkeys(window.weights, 0.0))
        yield window


def padding_waste(window: Window) -> float | None:
    """Share of a token task's positions on this rank that bear no loss: padding, prompts, the
    first token of a sequence. None where the positions cannot be told from the batch."""
    positions = 0
    for micro_batch in window.micro_batches:
        tokens = _tokens_of(micro_batch.data)
        if tokens is None:
            return None
        positions += tokens.numel()
    weight = window.weights.get("loss")
    return None if weight is None or not positions else 1.0 - weight / positions


def _tokens_of(data: Any) -> Tensor | None:
    if isinstance(data, Mapping):
        data = data.get("input_ids")
    elif isinstance(data, tuple | list) and data:
        data = data[0]
    return data if isinstance(data, Tensor) else None
