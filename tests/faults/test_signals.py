"""SIGTERM at any moment: exit 75, nothing lost, and the resumed run is the uninterrupted one."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from faults.trials import (
    Trigger,
    newest_hash,
    newest_step,
    only_run,
    rows,
    train,
    write_recipe,
)
from surefoot.core.errors import EXIT_DONE, EXIT_STOPPED
from surefoot.observe.events import read_events


@pytest.mark.faults_full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", ["mlp", "cnn"])
def test_told_to_stop_at_a_random_moment(
    name: str,
    tmp_path: Path,
    num_trials: Callable[[int, int], int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    recipe = str(write_recipe(tmp_path, name))
    output = tmp_path / "output.txt"
    code, seconds = train([recipe, "--runs", str(tmp_path / "whole")], output)
    assert code == EXIT_DONE, output.read_text()
    whole = only_run(tmp_path / "whole")
    assert whole is not None
    expected_rows, expected_hash = rows(whole), newest_hash(whole)
    times = [event.time for event in read_events(whole / "events.jsonl")]
    training_seconds = times[-1] - times[0]
    seed = random.SystemRandom().randrange(2**32)
    moments = random.Random(seed)
    stops: dict[str, int] = {}
    for trial in range(num_trials(5, 50)):
        trigger = Trigger.draw(moments, seconds, training_seconds)
        what = f"seed {seed}, trial {trial}, {trigger}"
        runs = tmp_path / f"trial-{trial}"
        code, _ = train([recipe, "--runs", str(runs)], output, trigger)
        assert code in (EXIT_DONE, EXIT_STOPPED), f"{what}: {code}\n{output.read_text()}"
        run = only_run(runs)
        if run is None or not (run / "config.yaml").exists():
            stops["before it began"] = stops.get("before it began", 0) + 1
            continue
        if code == EXIT_STOPPED:
            lost = len([r for r in rows(run) if r["row"] == "step"]) - newest_step(run)
            assert lost == 0, what
            assert [e.kind for e in read_events(run / "events.jsonl")][-1] in (
                "stopped",
                # It was told after it had finished.
                "finished",
            ), what
            stops[trigger.kind] = stops.get(trigger.kind, 0) + 1
            code, _ = train(["--resume", str(run)], output)
            assert code == EXIT_DONE, f"{what}\n{output.read_text()}"
        assert rows(run) == expected_rows, what
        assert newest_hash(run) == expected_hash, what
    print(f"{name}: stopped {stops}")
