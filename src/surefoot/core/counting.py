"""Arithmetic of a run: batches, epochs and horizons in updates. Pure functions.

An update takes micro-batch x window length x data-parallel degree samples. The degree is the number
of data-parallel ranks, not of devices: ranks that share one model (tensor, pipeline, context) share
the batch. Windows never cross the end of an epoch, so the last update of an epoch may be short.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

from surefoot.core.errors import RequestError
from surefoot.core.schedules import UNDECIDED, Undecided
from surefoot.core.units import Count, Epochs, Flops, Samples, Seconds, Steps, Tokens


def global_batch(micro_batch: int, window_length: int, data_parallel_degree: int = 1) -> int:
    """Number of samples of one full update.

    >>> global_batch(micro_batch=8, window_length=4, data_parallel_degree=2)
    64
    """
    for name, value in (
        ("micro_batch", micro_batch),
        ("window_length", window_length),
        ("data_parallel_degree", data_parallel_degree),
    ):
        if value < 1:
            raise RequestError(f"{name} is {value}", where=name, rule="it is at least 1")
    return micro_batch * window_length * data_parallel_degree


def updates_per_epoch(
    num_samples: int, samples_per_update: int, *, drop_short: bool = False
) -> int:
    """Number of updates of one epoch; a short last one is included unless dropped.

    >>> updates_per_epoch(100, 32), updates_per_epoch(100, 32, drop_short=True)
    (4, 3)

    Raises:
        RequestError: the epoch is shorter than one full update.
    """
    updates = num_samples // samples_per_update
    if not drop_short:
        updates = -(-num_samples // samples_per_update)
    if updates < 1:
        raise RequestError(
            f"an epoch of {num_samples} samples is shorter than an update of {samples_per_update}",
            rule="an epoch has at least one update",
            remedy="lower train.micro_batch or train.accumulation, or keep short batches",
        )
    return updates


@dataclass(frozen=True, slots=True)
class Pace:
    """What one update consumes: all that is needed to convert a count into updates."""

    samples_per_update: int
    """Global batch: samples of a full update over all data-parallel ranks."""
    num_samples: int | None = None
    """Size of the training set; None for a stream of unknown length."""
    drop_short: bool = False
    """Whether a short last update of an epoch is dropped."""
    tokens_per_sample: float | None = None
    """Average number of loss-bearing tokens of a sample; None if the task counts no tokens."""
    flops_per_sample: float | None = None
    """Floating-point operations of one sample's forward and backward; None if unknown."""
    flops_unknown: str = ""
    """Why they could not be counted; empty where they are known, or nobody asked."""

    @property
    def updates_per_epoch(self) -> int:
        """Number of updates of one epoch.

        Raises:
            RequestError: the data is a stream of unknown length.
        """
        if self.num_samples is None:
            raise _unknown("epochs", "the training data is a stream of unknown length")
        return updates_per_epoch(
            self.num_samples, self.samples_per_update, drop_short=self.drop_short
        )


def updates_in(count: Count, pace: Pace) -> int | Undecided:
    """Smallest number of updates that reaches `count`.

    A time gives `UNDECIDED`: how many updates fit is known only afterwards. Tokens and FLOPs use
    the average of a sample, so the answer is an estimate.

    >>> pace = Pace(samples_per_update=32, num_samples=100, tokens_per_sample=512)
    >>> [updates_in(count, pace) for count in (Steps(7), Epochs(2), Samples(101), Tokens(16385))]
    [7, 8, 5, 2]

    Raises:
        RequestError: the run does not count that unit.
    """
    match count:
        case Steps():
            return count.value
        case Seconds():
            return UNDECIDED
        case Epochs():
            return math.ceil(_exact(count.value) * pace.updates_per_epoch)
        case Samples():
            return _updates_for_samples(count.value, pace)
        case Tokens():
            if pace.tokens_per_sample is None:
                raise _unknown("tokens", "the task counts no tokens")
            return _updates_for_items(count.value, pace.tokens_per_sample, pace)
        case Flops():
            if pace.flops_per_sample is None:
                why = pace.flops_unknown or "they were not counted"
                raise _unknown("FLOPs", f"the operations of a sample are not known: {why}")
            return _updates_for_items(count.value, pace.flops_per_sample, pace)
        case _:
            raise _unknown(count.kind, f"{count.kind} do not measure how long a run is")


def warmup_updates(warmup: Count | float, pace: Pace, horizon: int | Undecided = UNDECIDED) -> int:
    """Number of updates of a span given as a count or as a share of the horizon.

    A plain float is a share; it is rounded to updates, to at least one if it is not 0.

    >>> pace = Pace(samples_per_update=32, tokens_per_sample=512)
    >>> [warmup_updates(warmup, pace, 1000) for warmup in (0.02, Tokens(375_000_000), Steps(9))]
    [20, 22889, 9]

    Raises:
        RequestError: a share of a horizon that is unknown in updates, or a span in time.
    """
    if isinstance(warmup, Count):
        updates = updates_in(warmup, pace)
        if isinstance(updates, Undecided):
            raise _unknown(warmup.kind, "a time does not determine the number of updates")
        return updates
    if isinstance(horizon, Undecided):
        raise _unknown("a share of the horizon", "the number of updates of the horizon is unknown")
    if not 0 <= warmup <= 1:
        raise RequestError(f"{warmup} is not a share", rule="a share of the horizon lies in [0, 1]")
    return max(1, round(warmup * horizon)) if warmup else 0


def decoder_flops_per_token(
    num_parameters: int, num_layers: int, embedding_dim: int, sequence_length: int
) -> float:
    """Floating-point operations of one token's forward and backward in a dense decoder.

    6 N + 12 L D S: each of the N parameters in a matrix product costs a multiplication and an
    addition in the forward and twice that in the backward, and so does each of the L D S pairs of
    attention, twice (scores and values). Recomputation is not counted, nor is the saving of causal
    kernels. Source: PaLM, arXiv:2204.02311, appendix B.

    Args:
        num_parameters: N, without embedding tables that are only looked up.
        num_layers: L.
        embedding_dim: D.
        sequence_length: S, in tokens.

    >>> decoder_flops_per_token(124_000_000, 12, 768, 1024)
    857246208.0
    """
    return 6.0 * num_parameters + 12.0 * num_layers * embedding_dim * sequence_length


@dataclass(frozen=True, slots=True)
class Span:
    """One span of updates in every unit that the run counts."""

    updates: int
    tokens: int | None
    share: float | None
    """Share of the horizon; None if its number of updates is unknown."""


def span_in_all_units(updates: int, pace: Pace, horizon: int | Undecided) -> Span:
    """A span of `updates` in updates, tokens and as a share of the horizon, for display.

    >>> span_in_all_units(20, Pace(32, tokens_per_sample=512), 1000)
    Span(updates=20, tokens=327680, share=0.02)
    """
    tokens = None
    if pace.tokens_per_sample is not None:
        tokens = round(updates * pace.samples_per_update * pace.tokens_per_sample)
    share = None if isinstance(horizon, Undecided) else updates / horizon
    return Span(updates, tokens, share)


def _updates_for_samples(samples: int, pace: Pace) -> int:
    if pace.num_samples is None:
        return -(-samples // pace.samples_per_update)
    per_epoch = pace.updates_per_epoch
    used = pace.num_samples
    if pace.drop_short:
        used = per_epoch * pace.samples_per_update
    epochs, rest = divmod(samples, used)
    return epochs * per_epoch + -(-rest // pace.samples_per_update)


def _updates_for_items(items: float, items_per_sample: float, pace: Pace) -> int:
    return _updates_for_samples(math.ceil(_exact(items) / _exact(items_per_sample)), pace)


def _exact(value: float) -> Fraction:
    # Through the shortest decimal: 0.1 epochs of 30 updates are 3 updates, not 4.
    return Fraction(repr(value))


def _unknown(what: str, why: str) -> RequestError:
    return RequestError(
        f"{what} cannot be converted to updates", rule=why, remedy="give the count in steps instead"
    )
