"""Counts of the settings become what a run counts exactly."""

from __future__ import annotations

from typing import Any

import pytest

from assembly.parts import settings_of
from surefoot.assembly.cadences import make_cadences, make_every
from surefoot.core.counting import Pace
from surefoot.core.errors import RequestError
from surefoot.core.units import Bytes, Epochs, Flops, Samples, Seconds, Steps, Tokens
from surefoot.data.order import BatchPlan
from surefoot.data.sources.stream import StreamPlan
from surefoot.engine.cadence import AtEnd, Every, Unit

PLAN = BatchPlan(10, micro_batch=4, drop_short=True)
PACE = Pace(samples_per_update=4, num_samples=10, drop_short=True, flops_per_sample=5.0)


@pytest.mark.parametrize(
    ("count", "due"),
    [
        (Steps(3), Every(3, Unit.STEPS)),
        (Samples(7), Every(7, Unit.SAMPLES)),
        (Tokens(9), Every(9, Unit.TOKENS)),
        (Seconds(2), Every(2, Unit.SECONDS)),
        (Epochs(2), Every(16, Unit.SAMPLES)),
        (Flops(100), Every(5, Unit.STEPS)),
    ],
)
def test_each_unit_is_counted_exactly(count: Any, due: Every) -> None:
    assert make_every(count, PLAN, PACE) == due


def test_an_epoch_of_a_stream_ends_where_the_stream_does() -> None:
    assert make_every(Epochs(2), StreamPlan(4), PACE) == Every(2, Unit.EPOCHS)


def test_bytes_are_no_length_of_a_run() -> None:
    with pytest.raises(RequestError, match="is not a length"):
        make_every(Bytes(1), PLAN, PACE)


def test_what_is_never_due_and_one_rank_compares_with_nobody() -> None:
    settings = settings_of(
        train={"horizon": "2 epochs"},
        evaluate={"every": "never"},
        checkpoint={"every": "epoch"},
        guard={"compare_ranks_every": "5 steps"},
    )
    due = make_cadences(settings, PLAN, PACE, num_ranks=1)
    assert (due.horizon.amount, due.horizon.unit) == (16, Unit.SAMPLES)
    assert due.save_every == Every(8, Unit.SAMPLES)
    assert isinstance(due.evaluate_every, AtEnd) and isinstance(due.compare_ranks_every, AtEnd)
    two = make_cadences(settings, PLAN, PACE, num_ranks=2)
    assert two.compare_ranks_every == Every(5, Unit.STEPS)
