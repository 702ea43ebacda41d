"""Two ranks told to stop at any moment, one of them or all: exit 75, nothing lost, all agree."""

from __future__ import annotations

import random
import signal
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from faults.launches import ALL, LAUNCHER, Fault, Whole, by_command, draw_stop, train
from faults.trials import newest_hash, newest_step, only_run, rows
from surefoot.core.errors import EXIT_DONE, EXIT_STOPPED
from surefoot.observe.events import read_events
from surefoot.observe.run_folder import CONFIG_NAME


@pytest.mark.faults_full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("how", "stated"),
    [("forked", 90), pytest.param("by the command", 10, marks=pytest.mark.ranks_full)],
)
def test_two_ranks_told_to_stop_at_a_random_moment(
    how: str,
    stated: int,
    tmp_path: Path,
    two_ranks: Whole,
    num_trials: Callable[[int, int], int],
) -> None:
    output = tmp_path / "output.txt"
    seed = random.SystemRandom().randrange(2**32)
    moments = random.Random(seed)
    stops: Counter[str] = Counter()
    trial = met = 0
    while met < num_trials(1, stated):
        trial += 1
        fault = draw_stop(moments, two_ranks.seconds)
        if how == "by the command":
            fault = replace(fault, amount=moments.randrange(1, 24))
        what = f"seed {seed}, trial {trial}, {fault}"
        runs = tmp_path / f"trial-{trial}"
        told = [two_ranks.recipe, "--runs", str(runs)]
        forked = how == "forked"
        stopped = train(told, output, fault) if forked else by_command(runs, told, output, fault)
        met += stopped.since_fault is not None
        assert not stopped.left, f"{what}: {stopped.left}"
        said = f"{what}: {stopped}\n{output.read_text()}"
        assert stopped.code in (EXIT_DONE, EXIT_STOPPED), said
        run = only_run(runs)
        if run is None or not (run / CONFIG_NAME).exists():
            assert stopped.code == EXIT_STOPPED, said
            stops["before it began"] += 1
            continue
        if stopped.code == EXIT_STOPPED:
            lost = len([row for row in rows(run) if row["row"] == "step"]) - newest_step(run)
            assert lost == 0, said
            # It may have been told after it had finished.
            last = [event.kind for event in read_events(run / "events.jsonl")][-1]
            assert last in ("stopped", "finished"), said
            stops[fault.moment if forked else "command"] += 1
            resumed = train(["--resume", str(run)], output)
            assert resumed.code == EXIT_DONE, f"{what}\n{output.read_text()}"
        assert rows(run) == two_ranks.rows, what
        assert newest_hash(run) == two_ranks.hash, what
        output.write_text("")
    print(f"two ranks, {how}: {met} signals, of which {stops} stopped a run before its end")


WAITS = """
name: waits
model: {kind: mlp, in_features: 3, hidden: [8], out_features: 1}
data:
  {kind: custom, target: "faults.launches:Slow", arguments: {file: FILE}, validation_fraction: 0}
task: {kind: regression}
schedule: {kind: constant}
train: {horizon: 12 steps, micro_batch: 3, accumulation: 2}
loader: {workers: 1}
evaluate: {every: never}
checkpoint: {every: 4 steps}
log: {console: "off"}
"""


@pytest.mark.faults_full
@pytest.mark.ranks_full
@pytest.mark.parametrize("target", [LAUNCHER, ALL, "0", "1"])
def test_ranks_leave_a_wait_for_data_together(target: str, tmp_path: Path) -> None:
    file, output = tmp_path / "file", tmp_path / "output.txt"
    recipe = tmp_path / "waits.yaml"
    recipe.write_text(WAITS.replace("FILE", str(file)))
    assert train([str(recipe), "--runs", str(tmp_path / "whole")], output).code == EXIT_DONE
    whole = only_run(tmp_path / "whole")
    assert whole is not None
    file.write_text(target)
    # One rank waits for the sample, the other one for that rank.
    stopped = train([str(recipe), "--runs", str(tmp_path / "cut")], output)
    assert stopped.code == EXIT_STOPPED and not stopped.left, output.read_text()
    run = only_run(tmp_path / "cut")
    assert run is not None and len(rows(run)) == newest_step(run) < 4
    file.unlink()
    assert train(["--resume", str(run)], output).code == EXIT_DONE
    assert rows(run) == rows(whole) and newest_hash(run) == newest_hash(whole)


def test_ranks_leave_an_evaluation_together_and_the_resume_does_it_again(
    tmp_path: Path, two_ranks: Whole
) -> None:
    output = tmp_path / "output.txt"
    fault = Fault("evaluation", 2, target="1", rank=1)
    stopped = train([two_ranks.recipe, "--runs", str(tmp_path / "cut")], output, fault)
    assert stopped.code == EXIT_STOPPED, output.read_text()
    run = only_run(tmp_path / "cut")
    assert run is not None and [row["row"] for row in rows(run)] == ["step"] * 5
    assert train(["--resume", str(run)], output).code == EXIT_DONE
    assert rows(run) == two_ranks.rows and newest_hash(run) == two_ranks.hash


@pytest.mark.faults_full
@pytest.mark.ranks_full
def test_a_launcher_that_is_told_twice_ends_a_rank_that_cannot_hear(
    tmp_path: Path, two_ranks: Whole
) -> None:
    output = tmp_path / "output.txt"
    stuck = Fault("update", 5, rank=1, act="hold")
    told = Fault("update", 5, LAUNCHER, signal.SIGINT, rank=0, again_after=1.0)
    ended = train([two_ranks.recipe, "--runs", str(tmp_path / "runs")], output, (stuck, told))
    assert ended.code == 128 + signal.SIGINT and not ended.left, output.read_text()
    run = only_run(tmp_path / "runs")
    assert run is not None and newest_step(run) == 4
    assert train(["--resume", str(run)], output).code == EXIT_DONE
    assert rows(run) == two_ranks.rows and newest_hash(run) == two_ranks.hash
