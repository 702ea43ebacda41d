"""Every kind of run: any chain of kills equals no kill; and each item of the state is needed."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from faults.chains import (
    DATA,
    MODELS,
    OPTIMIZERS,
    SCHEDULES,
    UPDATES,
    Case,
    Seen,
    attempt,
    compare,
    differences,
)
from surefoot.assembly.run_parts import Assembly
from surefoot.core.errors import RunFolderError
from surefoot.state import run_state

CASES = st.builds(
    Case,
    model=st.sampled_from(sorted(MODELS)),
    optimizer=st.sampled_from(sorted(OPTIMIZERS)),
    data=st.sampled_from(sorted(DATA)),
    schedule=st.sampled_from(sorted(SCHEDULES)),
    accumulation=st.integers(1, 4),
    workers=st.sampled_from([0, 0, 0, 1, 2]),
    ema=st.booleans(),
    dtype=st.sampled_from(["fp32", "bf16"]),
    save_every=st.integers(1, 4),
    evaluate_every=st.integers(1, 4),
)
KILLS = st.lists(
    st.tuples(st.integers(0, UPDATES - 1), st.integers(0, 3)), min_size=1, max_size=4, unique=True
)


@pytest.mark.faults_full
@pytest.mark.timeout(3600)
def test_any_chain_of_kills_equals_no_kill(num_trials: Callable[[int, int], int]) -> None:
    @settings(
        max_examples=num_trials(10, 300),
        deadline=None,
        # A failing case is small as it is, and each trial trains.
        phases=[Phase.generate],
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(CASES, KILLS)
    def property_of(case: Case, kills: list[tuple[int, int]]) -> None:
        with tempfile.TemporaryDirectory() as folder:
            assert differences(case, Path(folder), kills) == []

    property_of()


def dropped(item: str) -> Callable[[Assembly], None]:
    """An assembly that forgets one item of its state when it is restored."""

    def spoil(assembly: Assembly) -> None:
        state: Any = assembly.trainable.state
        if item == "model":
            state.model.load_state_dict = lambda *args, **named: None
        elif item == "optimizer":
            state.optimizer.load_state_by_name = lambda saved: None
        else:
            getattr(state, item).load_state_dict = lambda saved: None

    return spoil


FULL = Case(model="convolved", evaluate_every=1)
WITH_ITEM = {
    "progress": FULL,
    "model": FULL,
    "optimizer": FULL,
    "loss_scale": Case(model="convolved", dtype="fp16"),
    "average": FULL,
    "guard": Case(poisoned=True, data="arrays", evaluate_every=1),
    "plateau": FULL,
    "stopping": FULL,
    "best": FULL,
}


def chain(case: Case, folder: Path, spoil: Callable[[Assembly], None]) -> list[str]:
    whole, chained = Seen(), Seen()
    attempt(case, folder / "whole", whole, None)
    attempt(case, folder / "chained", chained, (5, 1))
    attempt(case, folder / "chained", chained, None, spoil)
    return compare(whole, chained)


@pytest.mark.parametrize("item", list(WITH_ITEM))
def test_an_item_that_is_not_restored_is_noticed(item: str, tmp_path: Path) -> None:
    assert chain(WITH_ITEM[item], tmp_path, lambda assembly: None) == [], "whole, it is equal"
    for path in tmp_path.iterdir():
        path.rename(path.with_name(f"first-{path.name}"))
    try:
        found = chain(WITH_ITEM[item], tmp_path, dropped(item))
    except (KeyError, AssertionError):
        return
    assert found


def test_random_numbers_that_are_not_restored_are_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_state, "restore_rng", lambda saved: None)
    assert any("rng" in name for name in chain(FULL, tmp_path, lambda assembly: None))


def test_a_log_that_is_not_cut_back_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "surefoot.observe.metrics_log.MetricsLog.resume_at", lambda self, offset: None
    )
    with pytest.raises(RunFolderError, match="rows of an earlier run"):
        chain(FULL, tmp_path, lambda assembly: None)


def test_every_item_of_the_state_is_tried() -> None:
    # These three say where the process stands; they are no state.
    held = set(run_state.RunState.__dataclass_fields__) - {"device", "rank", "layers"}
    assert held == set(WITH_ITEM)
