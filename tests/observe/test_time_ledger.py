"""The time ledger: phases exclude each other and sum to the wall clock, to the nanosecond."""

from __future__ import annotations

import pytest

from surefoot.observe import time_ledger as module
from surefoot.observe.time_ledger import Phase, TimeLedger


class Clock:
    """A clock that is moved by hand."""

    def __init__(self) -> None:
        self.now = 1000

    def __call__(self) -> int:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "perf_counter_ns", clock)
    return clock


def test_each_nanosecond_is_counted_once_also_when_nested(clock: Clock) -> None:
    ledger = TimeLedger()
    clock.now += 1
    with ledger.phase(Phase.EVALUATION):
        clock.now += 10
        with ledger.phase(Phase.DATA_WAIT):
            clock.now += 100
            with ledger.phase(Phase.DATA_WAIT):
                clock.now += 1000
        clock.now += 10000
    clock.now += 100000
    spent = ledger.read().nanoseconds
    assert spent[Phase.EVALUATION] == 10010
    assert spent[Phase.DATA_WAIT] == 1100
    assert spent[Phase.REST] == 100001
    assert set(spent) == set(Phase)


def test_the_phases_sum_to_the_wall_clock_exactly() -> None:
    ledger = TimeLedger()
    for count in range(1000):
        with ledger.phase(Phase(count % len(Phase))), ledger.phase(Phase.LOGGING):
            pass
    reading = ledger.read()
    assert sum(reading.nanoseconds.values()) == reading.wall_nanoseconds > 0


def test_reading_inside_a_phase_counts_what_has_passed(clock: Clock) -> None:
    ledger = TimeLedger()
    with ledger.phase(Phase.CHECKPOINT):
        clock.now += 7
        assert ledger.read().nanoseconds[Phase.CHECKPOINT] == 7
        clock.now += 5
    assert ledger.read().nanoseconds[Phase.CHECKPOINT] == 12


def test_an_error_ends_its_phase(clock: Clock) -> None:
    ledger = TimeLedger()
    with pytest.raises(KeyError), ledger.phase(Phase.COMPILE):
        clock.now += 3
        raise KeyError
    clock.now += 4
    spent = ledger.read().nanoseconds
    assert (spent[Phase.COMPILE], spent[Phase.REST]) == (3, 4)


def test_a_stretch_is_the_difference_of_two_readings(clock: Clock) -> None:
    ledger = TimeLedger()
    clock.now += 5
    before = ledger.read()
    with ledger.phase(Phase.LAUNCH):
        clock.now += 2_000_000_000
    stretch = ledger.read().since(before)
    assert stretch.nanoseconds[Phase.LAUNCH] == stretch.wall_nanoseconds == 2_000_000_000
    assert stretch.as_json() == {phase.label: 0.0 for phase in Phase} | {"launch": 2.0, "wall": 2.0}
    assert Phase.DATA_WAIT.label == "data wait"


def test_a_scope_is_made_once() -> None:
    ledger = TimeLedger()
    assert ledger.phase(Phase.LAUNCH) is ledger.phase(Phase.LAUNCH)
