"""What other people's logs have taught: gentle fine-tunings, appended runs, faults half hidden."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from diagnosis.made_up import COUNT, LOG_10, STEPS, cosine, examined, falling, first, noise
from surefoot.cli import main as command
from surefoot.core.errors import EXIT_DONE
from surefoot.diagnosis.readers import read_recording

EVALUATED = range(19, COUNT, 20)


@pytest.mark.parametrize(("spread", "cause"), [(0.06, None), (0.01, "labels-unrelated")])
def test_a_flat_loss_whose_batches_differ_is_that_of_a_trained_model(
    spread: float, cause: str | None
) -> None:
    """A guess has about the same loss on any sample."""
    loss = 2.3 * (1 + noise(spread))
    assert first(examined({"loss": loss, "lr": cosine(1e-3)})) == cause


def test_a_flat_loss_of_a_run_that_goes_on_is_no_guess() -> None:
    columns = {"step": 141_000.0 + 50 * STEPS, "loss": 3.7 + 0.05 * STEPS / COUNT + noise(0.05)}
    assert examined(columns).is_healthy


@pytest.mark.parametrize("with_rate", [True, False])
def test_a_norm_that_shrinks_with_the_rate_has_not_vanished(with_rate: bool) -> None:
    rate = np.concatenate([np.full(200, 1e-4), 1e-4 * np.linspace(1, 0.01, 200)])
    norm = 1.4 * (np.minimum(1.0, rate / 1e-4 + 0.02) if with_rate else falling(1.0, 0.05, 20))
    columns = {"loss": falling(2.19, 1.97, 60) + noise(0.003), "lr": rate, "grad_norm": norm}
    named = {finding.slug for finding in examined(columns).findings}
    assert ("vanishing-gradients" in named) is not with_rate


def test_sorted_data_are_seen_behind_a_long_transient() -> None:
    place = STEPS % 40 / 40
    pattern = 0.3 * np.sin(2 * np.pi * place)
    transient = 5 * np.exp(-STEPS / 30) * np.cos(STEPS / 7)
    loss = 3.5 + pattern + transient + noise(0.02)
    found = examined({"loss": loss, "lr": np.full(COUNT, 0.1), "epoch": STEPS // 40 * 1.0})
    assert first(found) == "data-not-shuffled"


@pytest.mark.parametrize("goes_on", [True, False])
def test_infinite_norms_under_a_finite_loss_are_skipped_updates(goes_on: bool) -> None:
    norm, loss = 1 + np.abs(noise(0.1, 1)), falling() + noise(0.02)
    if goes_on:
        norm[np.arange(30, COUNT, 2)] = math.inf
    else:
        norm[200:], loss[201:] = math.nan, math.nan
    found = examined({"loss": loss, "lr": cosine(), "grad_norm": norm})
    named = {finding.slug for finding in found.findings}
    assert (first(found) == "half-precision-overflow") is goes_on
    assert ("non-finite-loss-function" in named) is not goes_on


@pytest.mark.parametrize(("end", "cause"), [(1.475, "wrong-loss"), (1.9, None)])
def test_a_softmax_in_training_alone(end: float, cause: str | None) -> None:
    """The evaluation is an honest one."""
    columns = {"loss": falling(LOG_10, end, 60) + noise(0.02), "lr": np.full(COUNT, 1e-3)}
    evaluated = {n: 0.09 + math.exp(-n / 40) for n in EVALUATED}
    found = examined(columns, validation=evaluated, accuracy=0.97)
    assert ("wrong-loss" in {finding.slug for finding in found.findings}) is (cause is not None)


@pytest.mark.parametrize("comes_back", [True, False])
def test_a_stretch_of_bad_batches_comes_back(comes_back: bool) -> None:
    loss = falling(4.6, 2.1, 60) + noise(0.1)
    loss[220 : 260 if comes_back else COUNT] += 2.5
    found = examined({"loss": loss, "lr": cosine()})
    messages = [f.message for f in found.findings if f.slug == "bad-batch"]
    assert bool(messages) is comes_back
    if comes_back:
        assert "40 consecutive rows" in messages[0]
        assert "from step 220 to 259" in messages[0]


def test_of_two_runs_in_one_file_the_last_is_judged(tmp_path: Path) -> None:
    """The first one diverges; the second is healthy."""
    bad, good = 2.3 + STEPS / 50, falling() + noise(0.02)
    rows = [f"{n},{loss:.5f}" for curve in (bad, good) for n, loss in enumerate(curve)]
    (tmp_path / "log.csv").write_text("step,loss\n" + "\n".join(rows))
    recording = read_recording(tmp_path / "log.csv")
    assert recording.num_rows == COUNT
    assert "the last of 2 runs" in recording.kind
    assert recording["loss"].values.tolist() == pytest.approx(good, abs=1e-4)


def test_a_count_that_restarts_under_trained_weights_is_one_run(tmp_path: Path) -> None:
    rows = [f"{n % 240},{loss:.5f}" for n, loss in enumerate(falling())]
    (tmp_path / "log.csv").write_text("step,loss\n" + "\n".join(rows))
    assert read_recording(tmp_path / "log.csv").num_rows == COUNT


def test_a_heuristic_alone_does_not_stop_a_pipeline(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [f"{n},{loss:.5f},0.001" for n, loss in enumerate(2.3 * (1 + noise(0.005)))]
    (tmp_path / "log.csv").write_text("step,loss,lr\n" + "\n".join(rows))
    assert command.invoke(["doctor", str(tmp_path / "log.csv")]) == EXIT_DONE
    assert "error SFD402 labels-unrelated (heuristic)" in capsys.readouterr().out
