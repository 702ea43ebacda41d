"""Run folders that version 0.1 wrote are read, and gone on with, by every version after it.

`version_0_1/` was written by that version. `perceptron` was killed; it has an average of the
weights, a plateau, early stopping and a contract. `gpt` is finished. `outliers` was stopped, after
two spikes that it was rolled back for. `ranks` was sharded over two ranks. `state_hashes.json`
holds the hash of the state in each checkpoint.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from parallel.rank_pool import RankPool
from state.resumed import Ended, hash_of_restored, resumed
from surefoot.build import load
from surefoot.cli import main as command
from surefoot.core.errors import EXIT_DONE
from surefoot.observe.metrics_log import read_rows
from surefoot.observe.metrics_schema import deterministic
from surefoot.observe.readers.run_data import read_run
from surefoot.verify.state_hash import checkpoint_hash

WRITTEN = Path(__file__).with_name("version_0_1")
HASHES: dict[str, str] = json.loads((WRITTEN / "state_hashes.json").read_text(encoding="utf-8"))
RUNS = ("perceptron", "gpt", "outliers", "ranks")
OF_ONE_RANK = [name for name in HASHES if not name.startswith("ranks/")]
ON_ONE_RANK = ("parallel.shard=1", "train.accumulation=2")

Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def a_place_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    # What is resumed changes the directory: pytest goes back.
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def two_ranks() -> Iterator[RankPool]:
    pool = RankPool(2)
    yield pool
    pool.close()


def copies(tmp_path: Path, checkpoint: str) -> list[Path]:
    """The same checkpoint in two copies of everything: whatever resumes it writes beside it."""
    return [shutil.copytree(WRITTEN, tmp_path / name) / checkpoint for name in ("first", "second")]


@pytest.mark.parametrize("checkpoint", HASHES)
def test_what_is_read_is_what_was_written(checkpoint: str) -> None:
    assert checkpoint_hash(WRITTEN / checkpoint) == HASHES[checkpoint]


@pytest.mark.parametrize("checkpoint", OF_ONE_RANK)
def test_what_is_put_back_into_a_run_is_what_was_written(tmp_path: Path, checkpoint: str) -> None:
    here, _ = copies(tmp_path, checkpoint)
    assert hash_of_restored(here) == HASHES[checkpoint]


@pytest.mark.parametrize(
    ("checkpoint", "overrides", "accept", "last_step"),
    [
        ("perceptron/checkpoints/step-00000014", (), (), 40),
        ("gpt/checkpoints/step-00000012", (), (), 24),
        ("outliers/checkpoints/step-00000159", ('train.horizon="200 steps"',), (), 200),
        ("ranks/checkpoints/step-00000016", ON_ONE_RANK, ("train", "parallel"), 24),
    ],
)
def test_two_resumes_are_one(
    tmp_path: Path,
    checkpoint: str,
    overrides: tuple[str, ...],
    accept: tuple[str, ...],
    last_step: int,
) -> None:
    first, second = (resumed(path, overrides, accept) for path in copies(tmp_path, checkpoint))
    assert first == second
    assert_whole(first, checkpoint, last_step)


def test_two_resumes_on_two_ranks_are_one(tmp_path: Path, two_ranks: RankPool) -> None:
    checkpoint = "ranks/checkpoints/step-00000016"
    first, second = (two_ranks.run(2, resumed, path)[0] for path in copies(tmp_path, checkpoint))
    assert first == second
    assert_whole(first, checkpoint, 24)


def assert_whole(ended: Ended, checkpoint: str, last_step: int) -> None:
    """Every update once, those before the checkpoint as they were, and a new state at the end."""
    assert ended.steps == list(range(1, last_step + 1))
    begun_from = int(checkpoint[-8:])
    written = read_rows(WRITTEN / checkpoint.split("/")[0] / "metrics.jsonl")
    before = [deterministic(row) for row in written if row["step"] <= begun_from]
    assert ended.rows[: len(before)] == before
    assert len({*ended.states.values()}) == len(ended.states) > 0
    assert f"step-{last_step:08d}" in ended.states


@pytest.mark.parametrize(
    ("run", "status", "step", "loss", "best", "kinds"),
    [
        ("perceptron", "killed", 14, 2.0483527183532715, (12, 7.5350282192230225), "save"),
        ("gpt", "finished", 24, 4.2315897941589355, (24, 4.111293393037868), "finished"),
        ("outliers", "stopped", 159, 0.03854813799262047, (84, 0.15260564722120762), "roll-back"),
        ("ranks", "finished", 24, 2.069614887237549, (24, 4.774940113226573), "ledger"),
    ],
)
def test_metrics_and_events_are_read(
    run: str, status: str, step: int, loss: float, best: tuple[int, float], kinds: str
) -> None:
    read = read_run(WRITTEN / run)
    assert read.problems == ()
    summary = read.summary
    assert (summary.status.value, summary.step, summary.loss) == (status, step, loss)
    assert summary.best is not None
    assert (summary.best.step, summary.best.value) == best
    assert {"start", "save", kinds} <= {event.kind for event in read.events}
    assert read.record["packages"]["surefoot"] == "0.1.0"
    assert read.contract["horizon"] == read.config["train"]["horizon"]


def test_the_weights_of_a_run_are_loaded() -> None:
    loaded = load(WRITTEN / "gpt")
    assert (loaded.step, loaded.checkpoint.name) == (24, "step-00000024")


@pytest.mark.parametrize("run", RUNS)
def test_the_command_reads_them(run: str, tmp_path: Path, capsys: Capture) -> None:
    here = shutil.copytree(WRITTEN / run, tmp_path / run)
    assert command.invoke(["report", str(here)]) == EXIT_DONE
    assert run in (here / "report.html").read_text(encoding="utf-8")
    assert command.invoke(["checkpoint", "verify", str(here)]) == EXIT_DONE
    capsys.readouterr()
    assert command.invoke(["doctor", str(here), "--json", "-"]) == EXIT_DONE
    findings = [found["slug"] for found in json.loads(capsys.readouterr().out)["findings"]]
    assert findings == (["bad-batch"] if run == "outliers" else [])


def test_they_are_compared_and_listed(capsys: Capture) -> None:
    runs = [str(WRITTEN / run) for run in ("perceptron", "ranks")]
    assert command.invoke(["compare", *runs]) == EXIT_DONE
    assert "4.7749 (n=1)" in capsys.readouterr().out
    assert command.invoke(["runs", str(WRITTEN), "--json", "-"]) == EXIT_DONE
    listed = json.loads(capsys.readouterr().out)["runs"]
    assert {Path(row["path"]).name for row in listed} == set(RUNS)
