"""What the first and the last rows tell: kicks, leaks, guesses, and counts that begin anew."""

from __future__ import annotations

import math

import numpy as np
import pytest

from diagnosis.made_up import COUNT, LOG_10, STEPS, cosine, examined, falling, first, noise
from surefoot.core.reports import Event
from surefoot.diagnosis.recording import Floats, RecordingBuilder

EVALUATED = range(19, COUNT, 20)
ONE_EPOCH = STEPS / COUNT


def ascending(first_step: int, then: int) -> Floats:
    """Steps that fall back to `first_step` after `then` rows."""
    return np.where(then > STEPS, STEPS + 1, STEPS - then + first_step).astype(float)


@pytest.mark.parametrize("name", ["tokens", "samples", "batch_tokens"])
def test_items_of_a_batch_go_by_many_names(name: str) -> None:
    items = np.random.default_rng(3).integers(20, 200, COUNT).astype(float)
    loss = falling() * items / 100 + noise(0.02)
    assert first(examined({"loss": loss, "lr": cosine(), name: items})) == "uneven-batches"


def test_tokens_that_are_counted_up_are_no_items_of_a_batch() -> None:
    columns = {"loss": falling(end=1.0) + noise(0.02), "lr": cosine()}
    assert examined({**columns, "tokens": 100.0 * (STEPS + 1)}).is_healthy


def test_a_column_may_tell_the_number_of_classes() -> None:
    builder = RecordingBuilder("log", "made up")
    for n in range(3):
        builder.add({"step": n, "loss": 1.0, "n_classes": 7})
    assert builder.build().facts["num_classes"] == 7


@pytest.mark.parametrize("is_sum", [True, False])
def test_short_last_batches_show_a_sum(is_sum: bool) -> None:
    items = np.where(STEPS % 20 == 19, 12.0, 45.0)
    loss = falling(end=0.8) * (items / 45 if is_sum else 1) + noise(0.03)
    found = examined({"loss": loss, "lr": cosine(), "weight": items})
    assert first(found) == ("uneven-batches" if is_sum else None)


@pytest.mark.parametrize("keeps", [True, False])
def test_a_count_that_begins_anew_under_weights_that_do_not(keeps: bool) -> None:
    loss = falling() if keeps else np.concatenate([falling()[:240], falling()[:160]])
    found = examined({"step": ascending(1, 240), "loss": loss + noise(0.02)})
    assert ("resume-jump" in [f.slug for f in found.findings]) is True
    anew = "begins anew" in found.findings[0].message
    assert anew is keeps


@pytest.mark.parametrize("kind", ["resumed from checkpoint", "Resuming", "resume"])
def test_a_resume_has_many_words(kind: str) -> None:
    loss = falling() + np.where(STEPS > 200, 0.8 * np.exp(-(STEPS - 200) / 30), 0) + noise(0.03)
    event = Event(kind=kind, step=200, message="", data={}, time=0.0)
    assert first(examined({"loss": loss, "lr": cosine()}, events=(event,))) == "resume-jump"


@pytest.mark.parametrize(("level", "cause"), [(2.6, "target-leaks"), (0.001, None)])
def test_what_is_known_before_half_of_the_samples_leaks(level: float, cause: str | None) -> None:
    """Unless the evaluations know it, too: a task without noise, such as copying."""
    columns = {"loss": falling(end=1e-4, over=5), "lr": cosine(), "epoch": ONE_EPOCH}
    assert first(examined(columns, validation=dict.fromkeys(EVALUATED, level))) == cause


def test_an_easy_task_is_no_leak() -> None:
    columns = {"loss": falling(end=0.02, over=25) + noise(0.004), "lr": cosine()}
    evaluated = {n: float(falling(end=0.02, over=25)[n]) for n in EVALUATED}
    found = examined({**columns, "epoch": ONE_EPOCH}, validation=evaluated, accuracy=0.99)
    assert found.is_healthy


@pytest.mark.parametrize(("drop", "cause"), [(0.2, "rate-too-low"), (1.6, None)])
def test_a_loss_that_falls_ever_faster_from_a_guess(drop: float, cause: str | None) -> None:
    loss = LOG_10 - drop * (STEPS / COUNT) ** 1.3 + noise(0.02)
    norm = 20 + 0.004 * STEPS / COUNT if cause else 20 + 5 * STEPS / COUNT
    columns = {"loss": loss, "lr": np.full(COUNT, 1e-5), "weight_norm": norm}
    assert first(examined(columns, facts={"num_classes": 10})) == cause


@pytest.mark.parametrize("accuracy", [0.57, 0.11])
def test_one_answer_to_all_and_a_guess_to_the_end_are_labels(accuracy: float) -> None:
    start = 1.4 if accuracy > 0.5 else LOG_10 + 0.03
    end = 1.1 if accuracy > 0.5 else LOG_10
    columns = {"loss": falling(start, end, over=15) + noise(0.02), "lr": cosine()}
    columns["weight_norm"] = 5 + 0.5 * STEPS / COUNT
    evaluated = dict.fromkeys(EVALUATED, end)
    assert first(examined(columns, validation=evaluated, accuracy=accuracy)) == "labels-unrelated"


@pytest.mark.parametrize("kicked", [True, False])
def test_a_first_update_that_kicks(kicked: bool) -> None:
    loss, norm = falling() + noise(0.02), 1 + np.abs(noise(0.1, 1))
    loss[1], norm[1] = loss[1] + 1.0, norm[1] * (8 if kicked else 1)
    found = examined({"loss": loss, "lr": cosine(), "grad_norm": norm})
    assert first(found) == ("rate-too-high-at-start" if kicked else None)


@pytest.mark.parametrize("end", [2.05, 0.4])
def test_weights_that_ran_away_at_once(end: float) -> None:
    norm = 13 * (1 + 5 * np.minimum(STEPS / 40, 1.0))
    columns = {"loss": falling(end=end, over=120) + noise(0.05), "lr": cosine()}
    found = examined({**columns, "weight_norm": norm})
    assert ("rate-too-high" in [f.slug for f in found.findings]) is (end > 2)


def test_a_hard_batch_of_a_low_loss_is_no_divergence_before_a_nan() -> None:
    loss = falling(end=0.01, over=20) * np.exp(noise(1.0))
    loss[298], loss[300:] = 0.2, math.nan
    columns = {"loss": loss, "lr": cosine(), "epoch": 10 * STEPS / COUNT}
    assert "rate-too-high" not in [f.slug for f in examined(columns).findings]


@pytest.mark.parametrize(("accuracy", "cause"), [(0.66, None), (0.35, "underfitting")])
def test_a_floor_of_noisy_labels_is_no_small_model(accuracy: float, cause: str | None) -> None:
    curve = falling(math.log(4), 0.95, over=60)
    evaluated = {n: float(curve[n]) for n in EVALUATED}
    columns = {"loss": curve + noise(0.03), "lr": cosine()}
    rises = {n: accuracy - 0.05 * float(np.exp(-n / 60)) for n in EVALUATED}
    assert first(examined(columns, validation=evaluated, accuracy=rises)) == cause
