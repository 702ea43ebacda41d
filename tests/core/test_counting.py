"""The arithmetic of a run: batches, epochs and horizons in updates."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from surefoot.core.counting import (
    Pace,
    Span,
    global_batch,
    span_in_all_units,
    updates_in,
    updates_per_epoch,
    warmup_updates,
)
from surefoot.core.errors import RequestError
from surefoot.core.schedules import UNDECIDED
from surefoot.core.units import Bytes, Count, Epochs, Flops, Samples, Seconds, Steps, Tokens

PACE = Pace(samples_per_update=32, num_samples=100, tokens_per_sample=512, flops_per_sample=1e6)


def test_the_global_batch_counts_data_parallel_ranks() -> None:
    # 64 devices of which 8 hold parts of one model each: 8 of them see different data.
    assert global_batch(micro_batch=4, window_length=2, data_parallel_degree=64 // 8) == 64
    assert global_batch(micro_batch=4, window_length=2) == 8


@pytest.mark.parametrize("broken", ["micro_batch", "window_length", "data_parallel_degree"])
def test_an_empty_batch_is_refused(broken: str) -> None:
    sizes = {"micro_batch": 1, "window_length": 1, "data_parallel_degree": 1, broken: 0}
    with pytest.raises(RequestError, match=broken):
        global_batch(**sizes)


@given(st.integers(1, 10**6), st.integers(1, 10**4))
def test_an_epoch_covers_each_sample_once(num_samples: int, batch: int) -> None:
    kept = updates_per_epoch(num_samples, batch)
    assert (kept - 1) * batch < num_samples <= kept * batch
    if num_samples >= batch:
        dropped = updates_per_epoch(num_samples, batch, drop_short=True)
        assert dropped * batch <= num_samples < (dropped + 1) * batch


def test_an_epoch_without_an_update_is_refused() -> None:
    with pytest.raises(RequestError, match="31 samples is shorter than an update of 32"):
        updates_per_epoch(31, 32, drop_short=True)


@pytest.mark.parametrize(
    ("count", "updates"),
    [
        (Steps(7), 7),
        (Epochs(1), 4),
        (Epochs(2), 8),
        (Epochs(0.5), 2),
        (Epochs(0.51), 3),
        (Samples(1), 1),
        (Samples(32), 1),
        (Samples(33), 2),
        (Samples(96), 3),
        (Samples(97), 4),
        (Samples(100), 4),
        (Samples(101), 5),
        (Samples(200), 8),
        (Tokens(16_384), 1),
        (Tokens(16_385), 2),
        (Tokens(51_200), 4),
        (Tokens(51_201), 5),
        (Flops(32e6), 1),
        (Flops(100e6), 4),
        (Flops(101e6), 5),
    ],
)
def test_counts_in_updates(count: Count, updates: int) -> None:
    assert updates_in(count, PACE) == updates


def test_dropped_samples_are_not_counted() -> None:
    pace = Pace(samples_per_update=32, num_samples=100, drop_short=True)
    assert pace.updates_per_epoch == 3
    assert [updates_in(Samples(n), pace) for n in (96, 97, 192, 193)] == [3, 4, 6, 7]


def test_a_tenth_of_thirty_updates_is_three() -> None:
    pace = Pace(samples_per_update=1, num_samples=30)
    assert updates_in(Epochs(0.1), pace) == 3


@given(st.integers(1, 500), st.integers(1, 50), st.booleans(), st.integers(0, 2000))
def test_samples_agree_with_walking_through_epochs(
    num_samples: int, batch: int, drop_short: bool, wanted: int
) -> None:
    if drop_short and num_samples < batch:
        return
    pace = Pace(batch, num_samples, drop_short)
    seen = updates = 0
    while seen < wanted:
        left = (
            num_samples % batch if updates % pace.updates_per_epoch == num_samples // batch else 0
        )
        seen += left or batch
        updates += 1
    assert updates_in(Samples(wanted), pace) == updates


def test_time_is_undecided() -> None:
    assert updates_in(Seconds(60), PACE) is UNDECIDED


@pytest.mark.parametrize(
    ("count", "why"),
    [
        (Tokens(5), "counts no tokens"),
        (Flops(5), "operations of a sample"),
        (Epochs(1), "stream of unknown length"),
        (Bytes(5), "bytes do not measure"),
    ],
)
def test_what_a_run_does_not_count_is_refused(count: Count, why: str) -> None:
    with pytest.raises(RequestError) as caught:
        updates_in(count, Pace(samples_per_update=32))
    assert why in caught.value.rule
    assert "steps" in caught.value.remedy


def test_a_stream_counts_samples_without_epochs() -> None:
    assert updates_in(Samples(65), Pace(samples_per_update=32)) == 3


@pytest.mark.parametrize(
    ("warmup", "updates"),
    [
        (Steps(0), 0),
        (Steps(9), 9),
        (Tokens(16_385), 2),
        (Samples(100), 4),
        (Epochs(1), 4),
        (0.0, 0),
        (0.02, 20),
        (0.0001, 1),
        (1.0, 1000),
    ],
)
def test_warmup(warmup: Any, updates: int) -> None:
    assert warmup_updates(warmup, PACE, 1000) == updates


def test_gpt3s_warmup_of_tokens() -> None:
    # 375 million tokens at 3.2 million a batch, arXiv:2005.14165, appendix B.
    pace = Pace(samples_per_update=1562, tokens_per_sample=2048)
    assert warmup_updates(Tokens(375_000_000), pace) == 118


@pytest.mark.parametrize(
    ("warmup", "horizon", "what"),
    [
        (0.02, UNDECIDED, "a share of the horizon"),
        (Seconds(10), 1000, "seconds"),
        (1.5, 1000, "1.5 is not a share"),
    ],
)
def test_impossible_warmups_are_refused(warmup: Any, horizon: Any, what: str) -> None:
    with pytest.raises(RequestError, match=what):
        warmup_updates(warmup, PACE, horizon)


def test_one_warmup_in_all_units() -> None:
    assert span_in_all_units(20, PACE, 1000) == Span(20, 327_680, 0.02)
    assert span_in_all_units(20, Pace(32), UNDECIDED) == Span(20, None, None)
