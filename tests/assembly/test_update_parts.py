"""An update is made of its two sides; who hears of it is given when it is made."""

from __future__ import annotations

from typing import Any

import pytest

from assembly.parts import assembled
from parallel.small_runs import Recorder
from surefoot.core.errors import NonFiniteError


def test_the_update_reports_to_those_it_was_made_with_and_counts_in_the_state() -> None:
    assembly, recorder = assembled(), Recorder()
    update = assembly.make_update((recorder,))
    windows = assembly.open_windows(assembly.trainable.state.progress.cursor)
    update(next(windows))
    update(next(windows))
    windows.close()
    assert update.parts.log.settle() == assembly.trainable.state.progress.step == 2
    assert [report.step for report in recorder.reports] == [1, 2]
    assert [report.samples for report in recorder.reports] == [4, 8]


def test_what_went_wrong_is_looked_into_before_it_is_told() -> None:
    assembly, seen = assembled(), []

    def investigate(event: Any, window: Any, denominators: Any) -> dict[str, object]:
        seen.append((event.kind, window.samples, dict(denominators)))
        return {"meaning": "it was poisoned"}

    update = assembly.make_update(investigate=investigate)
    assembly.material.model.weight.data.fill_(float("nan"))  # type: ignore[operator, union-attr]
    windows = assembly.open_windows(assembly.trainable.state.progress.cursor)
    update(next(windows))
    windows.close()
    with pytest.raises(NonFiniteError, match="poisoned"):
        update.parts.log.settle()
    assert seen == [("non-finite", 4, {"loss": 4.0})]


@pytest.mark.parametrize("every", ["never", "2 steps"])
def test_details_are_sampled_where_the_settings_ask(every: str) -> None:
    assembly, recorder = assembled(log={"console": "off", "details_every": every}), Recorder()
    update = assembly.make_update((recorder,))
    windows = assembly.open_windows(assembly.trainable.state.progress.cursor)
    for _ in range(2):
        update(next(windows))
    windows.close()
    update.parts.log.settle()
    assert any(report.details for report in recorder.reports) is (every != "never")
