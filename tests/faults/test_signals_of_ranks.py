"""Two ranks told to stop at any moment, one of them or all: exit 75, nothing lost, all agree."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from faults.launches import draw_stop, train
from faults.test_signals import newest_hash, newest_step, only_run
from faults.trials import rows, write_recipe
from surefoot.core.errors import EXIT_DONE, EXIT_STOPPED
from surefoot.observe.events import read_events
from surefoot.observe.run_folder import CONFIG_NAME


@pytest.mark.faults_full
@pytest.mark.timeout(3600)
def test_two_ranks_told_to_stop_at_a_random_moment(
    tmp_path: Path, num_trials: Callable[[int, int], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    recipe = str(write_recipe(tmp_path, "mlp"))
    output = tmp_path / "output.txt"
    whole = train([recipe, "--runs", str(tmp_path / "whole")], output)
    assert whole.code == EXIT_DONE, output.read_text()
    run = only_run(tmp_path / "whole")
    assert run is not None
    expected_rows, expected_hash = rows(run), newest_hash(run)
    seed = random.SystemRandom().randrange(2**32)
    moments = random.Random(seed)
    stops: dict[str, int] = {}
    for trial in range(num_trials(2, 100)):
        fault = draw_stop(moments, whole.seconds)
        what = f"seed {seed}, trial {trial}, {fault}"
        runs = tmp_path / f"trial-{trial}"
        stopped = train([recipe, "--runs", str(runs)], output, fault)
        assert not stopped.left, f"{what}: {stopped.left}"
        said = f"{what}: {stopped}\n{output.read_text()}"
        assert stopped.code in (EXIT_DONE, EXIT_STOPPED), said
        run = only_run(runs)
        if run is None or not (run / CONFIG_NAME).exists():
            assert stopped.code == EXIT_STOPPED, said
            stops["before it began"] = stops.get("before it began", 0) + 1
            continue
        if stopped.code == EXIT_STOPPED:
            lost = len([row for row in rows(run) if row["row"] == "step"]) - newest_step(run)
            assert lost == 0, said
            # It may have been told after it had finished.
            last = [event.kind for event in read_events(run / "events.jsonl")][-1]
            assert last in ("stopped", "finished"), said
            stops[fault.moment] = stops.get(fault.moment, 0) + 1
            resumed = train(["--resume", str(run)], output)
            assert resumed.code == EXIT_DONE, f"{what}\n{output.read_text()}"
        assert rows(run) == expected_rows, what
        assert newest_hash(run) == expected_hash, what
        output.write_text("")
    print(f"two ranks: stopped {stops}")
