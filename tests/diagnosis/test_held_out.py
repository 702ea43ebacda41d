"""The held-out runs are real and readable. What the doctor says of them is scored, not tested."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from diagnosis.held_out.runs import FAULTS, KINDS, made, write
from diagnosis.score import DEVELOPMENT, HELD_OUT, score
from surefoot.diagnosis.causes import all_causes
from surefoot.diagnosis.readers import read_recording


def test_each_fault_is_one_that_the_doctor_can_name() -> None:
    assert FAULTS.keys() <= {cause.info.slug for cause in all_causes()}
    for _, kinds in FAULTS.values():
        assert set(kinds) <= KINDS.keys()


@pytest.mark.parametrize("kind", ["wines", "linear_regression", "bigrams"])
def test_a_run_learns_and_is_read(kind: str, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    recording = read_recording(write(made(kind, seed=1), tmp_path / "log.csv"))
    loss = recording["loss"].values
    assert loss[-10:].mean() < 0.9 * loss[:10].mean()
    assert len(recording.validation[1]) >= 5


def test_the_score_says_which_runs_the_thresholds_were_tuned_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.set_num_threads(1)
    fault, _ = FAULTS["warmup-too-long"]
    sick = write(made("wines", 1, fault), tmp_path / "warmup-too-long__wines.csv")
    healthy = write(made("wines", 1), tmp_path / "healthy__wines.csv")
    logs = [("warmup-too-long", sick), ("healthy", healthy)]
    assert score(HELD_OUT, logs)
    assert not score(DEVELOPMENT, [("overfitting", healthy), ("healthy", sick)])
    text = capsys.readouterr().out
    assert "== held-out runs: no threshold was tuned on them" in text
    assert "== development runs: THE THRESHOLDS WERE TUNED ON THESE GENERATORS" in text
    assert "held-out runs: cause named first: 1 of 1" in text
    assert "development runs: cause named first: 0 of 1" in text
    assert "healthy runs called sick: 1 of 1" in text
