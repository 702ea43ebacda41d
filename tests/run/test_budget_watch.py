"""A spent budget asks for a stop, once; what was spent before a resume counts."""

from __future__ import annotations

from math import inf
from pathlib import Path

import pytest

from surefoot.config.sections.contract import BudgetSection, ContractOffSection, ContractOnSection
from surefoot.core.budget import Budget
from surefoot.core.reports import Event
from surefoot.core.units import Seconds
from surefoot.observe.events import EventLog, read_events
from surefoot.observe.readers.stretches import elapsed_at, stretches_of
from surefoot.run.budget_watch import Spending, budget_of


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Asked:
    def __init__(self) -> None:
        self.reasons: list[str] = []

    def ask(self, reason: str) -> None:
        self.reasons.append(reason)


def watched(
    folder: Path, budget: Budget, devices: int = 1, events: list[Event] | None = None
) -> tuple[Spending, Clock, Asked, list[tuple[str, object]]]:
    log = EventLog(folder / "events.jsonl")
    for event in events or ():
        log.on_event(event)
    log.close()
    clock, asked, told = Clock(), Asked(), []
    spending = Spending(
        budget,
        devices,
        read_events(folder / "events.jsonl"),
        0.0,
        lambda kind, message, data: told.append((kind, data)),
        asked,
        clock,
    )
    return spending, clock, asked, told


@pytest.mark.parametrize(
    ("budget", "devices", "ends_at"),
    [
        (Budget(wall_seconds=100), 4, 100.0),
        (Budget(device_hours=1), 4, 900.0),
        (Budget(cost=6, price_per_device_hour=3), 4, 1800.0),
        (Budget(wall_seconds=100, device_hours=1), 1, 100.0),
    ],
)
def test_it_asks_at_the_limit_and_only_once(
    tmp_path: Path, budget: Budget, devices: int, ends_at: float
) -> None:
    spending, clock, asked, told = watched(tmp_path, budget, devices)
    clock.now = ends_at - 0.01
    spending.check()
    assert asked.reasons == []
    clock.now = ends_at
    assert list(spending.watching(iter("abc"))) == ["a", "b", "c"]
    assert len(asked.reasons) == 1 and asked.reasons[0].startswith("the budget is spent: ")
    ((kind, data),) = told
    assert kind == "budget"
    assert isinstance(data, dict)
    assert data["limit"] in data


def test_no_budget_never_asks(tmp_path: Path) -> None:
    spending, clock, asked, _ = watched(tmp_path, Budget())
    clock.now = 1e12
    spending.check()
    assert asked.reasons == []


def test_what_was_spent_before_counts_with_the_devices_of_its_time(tmp_path: Path) -> None:
    before = [
        Event("start", 0, "", {"devices": 4}, 1000.0),
        Event("stopped", 0, "", {}, 1500.0),
        # Killed; the resume after it knows of a later sign of life.
        Event("resume", 0, "", {"devices": 2}, 9000.0),
        Event("save", 0, "", {}, 9010.0),
        Event("resume", 0, "", {"devices": 1, "last_seen": 9100.0}, 20000.0),
        Event("stopped", 0, "", {}, 20100.0),
    ]
    # 4 x 500 + 2 x 100 + 1 x 100 = 2300 device-seconds are gone.
    spending, clock, asked, _ = watched(tmp_path, Budget(device_hours=1), 1, before)
    clock.now = 3600 - 2300 - 0.1
    spending.check()
    assert asked.reasons == []
    clock.now += 0.2
    spending.check()
    assert len(asked.reasons) == 1
    assert elapsed_at(stretches_of(before), 20050.0) == 500 + 100 + 50


def test_the_time_of_an_attempt_counts_from_its_event(tmp_path: Path) -> None:
    spending, clock, asked, _ = watched(tmp_path, Budget(wall_seconds=10))
    clock.now = 8.0
    assert spending.event_data() == {"devices": 1}
    clock.now = 17.9
    spending.check()
    assert asked.reasons == []
    clock.now = 18.0
    spending.check()
    assert len(asked.reasons) == 1


def test_the_budget_of_a_contract() -> None:
    section = BudgetSection(device_hours=2, wall_clock=Seconds(60), price_per_device_hour=1.5)
    contract = ContractOnSection(kind="research", task="x", budget=section)
    assert budget_of(contract) == Budget(2.0, 60.0, inf, 1.5)
    assert budget_of(ContractOffSection()) == Budget()
