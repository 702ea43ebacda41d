"""A schedule of somebody else's: any function of the updates completed, checked in use."""

from __future__ import annotations

import math
from typing import Any

import pytest

from surefoot.config.building import make_schedule
from surefoot.config.load import resolve_settings
from surefoot.core.counting import Pace
from surefoot.core.errors import ConfigError, RequestError
from surefoot.core.own_schedule import as_schedule, schedule_of
from surefoot.core.schedules import UNDECIDED, Constant, Schedule, first_difference


def halving(n: int, every: int = 10) -> float:
    return 0.5 ** (n // every)


class Line:
    """Down to zero at the horizon."""

    def __init__(self, horizon: int) -> None:
        self.horizon = horizon

    def __call__(self, n: int) -> float:
        return max(0.0, 1 - n / self.horizon)


def settings(schedule: dict[str, Any], horizon: str = "40 steps") -> Any:
    train = {"horizon": horizon, "micro_batch": 4}
    return resolve_settings({"train": train, "schedule": schedule}).config


def custom(name: str, **arguments: Any) -> dict[str, Any]:
    return {"kind": "custom", "target": f"{__name__}:{name}", "arguments": arguments}


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, __name__, sys.modules[halving.__module__])


def test_a_function_and_a_schedule_are_schedules() -> None:
    assert isinstance(as_schedule(halving), Schedule)
    assert as_schedule(halving)(25) == 0.25
    constant = Constant()
    assert as_schedule(constant) is constant


@pytest.mark.parametrize("value", [math.nan, math.inf, -0.1, "0.1", True, None])
def test_what_is_no_multiplier_is_refused_when_it_is_given(value: Any) -> None:
    schedule = as_schedule(lambda n: 1.0 if n < 5 else value, "mine")
    assert schedule(4) == 1.0
    with pytest.raises(RequestError, match=r"the schedule mine gave .* for update 5"):
        schedule(5)


def test_the_first_update_is_not_wasted() -> None:
    with pytest.raises(RequestError, match="above 0 at the first update"):
        as_schedule(lambda n: n / 10)


@pytest.mark.parametrize(("given", "said"), [(Line, "the class"), (3, "a int")])
def test_what_is_no_schedule_is_refused(given: Any, said: str) -> None:
    with pytest.raises(RequestError, match=said):
        as_schedule(given)


def test_a_recipe_names_a_function_with_its_arguments() -> None:
    schedule = make_schedule(settings(custom("halving", every=5)), Pace(4))
    assert [schedule(n) for n in (0, 4, 5, 10)] == [1.0, 1.0, 0.5, 0.25]
    with pytest.raises(RequestError, match="evry"):
        make_schedule(settings(custom("halving", evry=5)), Pace(4))


def test_one_that_asks_for_the_horizon_gets_it_in_updates() -> None:
    schedule = make_schedule(settings(custom("Line")), Pace(4))
    assert schedule(10) == 0.75
    # Another horizon is another rate from the first update on: a resume is told so.
    longer = make_schedule(settings(custom("Line"), "80 steps"), Pace(4))
    assert first_difference(schedule, longer, 3) == 1
    with pytest.raises(RequestError, match="not known in updates"):
        schedule_of(Line, {}, UNDECIDED, "mine:Line")


def test_an_unknown_kind_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'warmup_cosine'"):
        settings({"kind": "warmup_cosin"})


def test_one_that_was_handed_in_must_be_handed_in_again() -> None:
    given = settings({"kind": "given", "target": "mine:<lambda>"})
    assert make_schedule(given, Pace(4), given=as_schedule(halving))(10) == 0.5
    with pytest.raises(RequestError, match=r"pass schedule=\.\.\. again"):
        make_schedule(given, Pace(4))
