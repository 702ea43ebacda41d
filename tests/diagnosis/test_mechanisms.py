"""Each mechanism of the doctor on made-up columns: the fault, and the healthy run that is like it.

Real trainings are in `test_doctor.py`; what tells look-alikes apart is in `test_look_alikes.py`.
"""

from __future__ import annotations

import math

import numpy as np
import pytest

from diagnosis.made_up import COUNT, LOG_10, STEPS, cosine, examined, falling, first, noise
from surefoot.core.reports import Event
from surefoot.diagnosis.doctor import Diagnosis
from surefoot.diagnosis.recording import Floats

# -- half precision ------------------------------------------------------------------------------


def scaled(overflows: list[int], *, dynamic: bool) -> Diagnosis:
    """Overflows leave the loss as it is; a dynamic scale is halved, and doubled after 80 rows."""
    norm, scale, now, since = 1 + np.abs(noise(0.1, 1)), np.empty(COUNT), 2.0**18, 0
    for n in range(COUNT):
        scale[n] = now
        if n in overflows:
            norm[n] = np.inf
        since = 0 if n in overflows else since + 1
        if dynamic:
            now *= 0.5 if n in overflows else 2.0 if since == 80 else 1.0
            since %= 80
    columns = {"loss": falling() + noise(0.03), "lr": cosine(), "grad_norm": norm}
    return examined({**columns, "loss_scale": scale}, facts={"precision": "fp16"})


def test_overflow_that_a_dynamic_scale_meets_is_no_fault() -> None:
    assert scaled([0, 1, 120, 210, 300], dynamic=True).is_healthy


def test_a_fixed_scale_that_drops_updates_is_named() -> None:
    found = scaled(list(range(40, COUNT, 4)), dynamic=False)
    assert first(found) == "half-precision-overflow"
    assert found.findings[0].evidence["not_finite"] == 90


def test_a_few_overflows_of_a_fixed_scale_are_no_fault() -> None:
    assert scaled([40, 90, 200], dynamic=False).is_healthy


def test_a_scale_that_keeps_falling_is_named() -> None:
    found = scaled(list(range(40, COUNT, 15)), dynamic=True)
    assert first(found) == "half-precision-overflow"


def test_without_a_scale_a_gradient_that_is_not_finite_is_the_loss_functions() -> None:
    norm = np.ones(COUNT)
    norm[200] = np.inf
    found = examined({"loss": falling() + noise(0.03), "lr": cosine(), "grad_norm": norm})
    assert first(found) == "non-finite-loss-function"


# -- rates ---------------------------------------------------------------------------------------


def test_a_low_last_stage_of_step_decay_does_not_end_early() -> None:
    rate = np.select([STEPS < 200, STEPS < 300], [0.1, 0.01], 0.001)
    loss = falling(end=0.1, over=40) + noise(0.02)
    assert examined({"loss": loss, "lr": rate}).is_healthy


@pytest.mark.parametrize("rest", [0.001, 0.0])
def test_a_schedule_that_cuts_off_a_falling_loss_ends_early(rest: float) -> None:
    rate = np.where(STEPS < 160, 0.1, rest)
    loss = 2.3 - 0.008 * np.minimum(STEPS, 160) + noise(0.02)
    assert first(examined({"loss": loss, "lr": rate})) == "schedule-ends-early"


def test_one_hard_batch_at_the_start_is_no_jump() -> None:
    loss = falling() + noise(0.03)
    loss[1] = 2.7
    assert examined({"loss": loss, "lr": cosine()}).is_healthy
    loss[1:6] = [2.7, 3.4, 3.1, 2.9, 2.8]
    assert first(examined({"loss": loss, "lr": cosine()})) == "rate-too-high-at-start"
    loss[1:6] = [25.0, 2.2, 2.2, 2.1, 2.1]
    assert first(examined({"loss": loss, "lr": cosine()})) == "rate-too-high-at-start"


def plateau(sway: float) -> Diagnosis:
    """A loss that stands still at a constant rate; evaluations go up and down by a share."""
    loss = falling(end=0.6, over=30) + noise(0.25)
    validation = {n: 0.3 * (1 + sway * (-1) ** (n // 25)) for n in range(24, COUNT, 25)}
    return examined({"loss": loss, "lr": np.full(COUNT, 0.03)}, validation=validation)


def test_evaluations_that_sway_on_a_plateau_ask_for_decay() -> None:
    assert first(plateau(0.15)) == "rate-too-high-late"
    assert plateau(0.01).is_healthy  # Nothing is to be gained from decay: the noise is the data's.


def test_what_is_lost_again_at_the_same_rate_was_too_high() -> None:
    loss = np.where(STEPS < 120, falling(end=0.9, over=30), 2.05) + noise(0.1)
    assert first(examined({"loss": loss, "lr": np.full(COUNT, 0.1)})) == "rate-too-high"
    # The same rise under a rate that has decayed is harder data, not the rate.
    found = examined({"loss": loss, "lr": cosine()})
    assert first(found) != "rate-too-high"


def test_a_loss_that_was_away_while_the_rate_was_highest_was_too_high() -> None:
    away = np.where((STEPS > 50) & (STEPS < 100), 3.0, 0.0)
    loss = falling(start=1.2, over=120) + away + np.abs(noise(0.2))
    loss[70] = 9.0
    assert first(examined({"loss": loss, "lr": cosine(0.8)})) == "rate-too-high"


def test_a_line_that_is_straight_for_its_rate_is_too_low() -> None:
    """Under a cosine the loss falls with the sum of the rates, not with the steps."""
    rate = cosine(1e-5)
    loss = 4.6 - 0.4 * np.cumsum(rate) / rate.sum() + noise(0.01)
    weights = 10 + 0.05 * STEPS / COUNT
    columns = {"loss": loss, "lr": rate, "weight_norm": weights}
    steep = {"loss": falling(4.6, 4.2, 40) + noise(0.01), "lr": rate, "weight_norm": weights}
    assert first(examined(columns)) == "rate-too-low"
    assert first(examined(steep)) is None


# -- data and labels -----------------------------------------------------------------------------


def test_the_tail_of_small_batches_is_no_bad_batch() -> None:
    """Batches of four: most losses near nothing, some at many times the noise."""
    random = np.random.default_rng(3)
    tail = np.where(random.random(COUNT) < 0.15, random.exponential(0.6, COUNT), 0.0)
    loss = falling(end=0.1) + np.abs(noise(0.05)) + tail
    assert examined({"loss": loss, "lr": cosine()}).is_healthy
    loss = falling(end=0.1) + np.abs(noise(0.05))
    loss[[150, 260]] = 3.0
    found = examined({"loss": loss, "lr": cosine()})
    assert first(found) == "bad-batch"
    assert found.findings[0].evidence["steps"] == [150, 260]


def flat(level: float, **known: object) -> Diagnosis:
    """A loss that stays where it was while the weights move."""
    accuracy, facts = known.pop("accuracy", None), known
    return examined(
        {
            "loss": level * (1 + noise(0.02)),
            "lr": cosine(),
            "grad_norm": 0.5 + np.abs(noise(0.05, 1)),
            "weight_norm": 5 + 0.3 * STEPS / COUNT,
        },
        validation=dict.fromkeys(range(49, COUNT, 50), level) | {399: level * 1.001},
        accuracy=float(accuracy) if isinstance(accuracy, float) else None,
        facts=facts,
    )


def test_a_flat_loss_is_that_of_a_guess_only_near_the_level_of_a_guess() -> None:
    assert first(flat(LOG_10, accuracy=0.1)) == "labels-unrelated"
    assert first(flat(LOG_10, num_classes=10)) == "labels-unrelated"
    assert flat(0.08, accuracy=0.97).is_healthy  # A good start.
    assert flat(0.08, num_classes=10).is_healthy
    assert first(flat(1.0)) == "labels-unrelated"  # Nothing says what a guess would cost.


def test_a_loss_that_settles_at_a_guess_from_above_has_learnt_nothing() -> None:
    columns = {
        "loss": falling(2.7, LOG_10, 25) + noise(0.01),
        "lr": np.full(COUNT, 1e-3),
        "weight_norm": 6 - 0.2 * STEPS / COUNT,
    }
    validation = {n: 2.31 + 0.0001 * n for n in range(49, COUNT, 50)}
    for classes, slug in ((10, "labels-unrelated"), (100, None)):
        found = examined(columns, validation=validation, facts={"num_classes": classes})
        assert (first(found) == "labels-unrelated") is (slug is not None)


@pytest.mark.parametrize("is_sum", [True, False])
def test_a_summed_loss_follows_the_size_of_its_batch(is_sum: bool) -> None:
    items = np.random.default_rng(5).integers(8, 65, COUNT).astype(float)
    loss = (falling() + noise(0.05)) * (items if is_sum else 1.0)
    found = examined({"loss": loss, "lr": cosine(), "weight": items})
    assert first(found) == ("uneven-batches" if is_sum else None)


def test_data_or_loss_function_where_the_log_cannot_tell_both_are_named() -> None:
    loss, norm = falling() + noise(0.03), 1 + np.abs(noise(0.1))
    loss[200:], norm[200:] = np.nan, np.nan
    columns = {"loss": loss, "lr": cosine(), "grad_norm": norm}
    new = examined({**columns, "epoch": np.zeros(COUNT)})
    seen = examined({**columns, "epoch": STEPS / 50})
    both = ["non-finite-data", "non-finite-loss-function"]
    for found in (new, seen):
        assert [finding.slug for finding in found.findings][:2] == both
    assert "samples that are new" in new.findings[0].message
    assert "had gone through before" in seen.findings[0].message
    for finding in (new.findings[1], seen.findings[1]):
        assert "would look the same" in finding.message


@pytest.mark.parametrize("rises", [False, True])
def test_a_leak_in_training_alone_is_not_learning_by_heart(rises: bool) -> None:
    columns = {"loss": falling(4.7, 0.1, 25) + np.abs(noise(0.01)), "lr": cosine()}
    validation = {n: (2.2 + n / 200 if rises else 3.0 - n / 600) for n in range(24, COUNT, 25)}
    found = examined(columns, validation=validation, facts={"task": "generation"})
    assert (first(found) == "target-leaks") is not rises


# -- generalisation, loss, memory, resume --------------------------------------------------------


@pytest.mark.parametrize(("last", "sick"), [(0.68, True), (0.47, False)])
def test_a_steady_rise_from_a_low_best_is_overfitting(last: float, sick: bool) -> None:
    """The best is far below the first loss: a rise is judged against the best, too."""
    validation = {n: 0.45 + 1.2 * math.exp(-n / 30) for n in range(24, 150, 25)}
    validation |= {n: 0.46 + (last - 0.46) * (n - 150) / 250 for n in range(174, COUNT, 25)}
    columns = {"loss": falling(end=0.005) + 0.1 * noise(0.01), "lr": cosine()}
    found = examined(columns, validation=validation)
    assert (first(found) == "overfitting") is sick


def test_the_floor_after_a_softmax_is_known_though_the_loss_leaves_its_start_at_once() -> None:
    floor = math.log(math.e + 9) - 1
    loss = falling(LOG_10, floor + 0.01, 12) + np.abs(noise(0.005))
    validation = {n: float(loss[n]) + 0.02 for n in range(49, COUNT, 50)}
    columns = {"loss": loss, "lr": np.full(COUNT, 3e-3), "grad_norm": np.full(COUNT, 0.1)}
    found = examined(columns, validation=validation, accuracy=0.97, facts={"num_classes": 10})
    assert first(found) == "wrong-loss"


@pytest.mark.parametrize(
    "text",
    [
        "RuntimeError: [enforce fail at alloc_cpu.cpp:114] . DefaultCPUAllocator: not enough"
        " memory: you tried to allocate 68719476736 bytes.",
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.38 GiB.",
        "numpy._core._exceptions._ArrayMemoryError: Unable to allocate 74.5 GiB for an array",
        "terminate called after throwing an instance of 'std::bad_alloc'",
    ],
)
def test_every_allocators_words_are_known(text: str) -> None:
    columns = {"loss": falling() + noise(0.03), "lr": cosine()}
    found = examined(columns, events=(Event("failure", 400, text),))
    assert first(found) == "out-of-memory"
    other = examined(columns, events=(Event("failure", 400, "KeyError: 'zoom'"),))
    assert other.is_healthy


def resumed(loss: Floats, rate: Floats, steps: Floats | None = None) -> Diagnosis:
    columns = {"loss": loss, "lr": rate, "grad_norm": 1 + np.abs(noise(0.1))}
    return examined(columns, events=(Event("resume", 200, "resumed"),))


def test_a_resume_that_goes_on_is_healthy() -> None:
    assert resumed(falling(4.6, 2.4) + noise(0.2), cosine()).is_healthy


def test_a_lasting_jump_below_the_noise_is_seen_at_a_resume() -> None:
    loss = falling(4.6, 2.4) + noise(0.2)
    loss[200:] += 0.45 * np.exp(-np.arange(200) / 300)
    found = resumed(loss, cosine())
    assert first(found) == "resume-jump"


@pytest.mark.parametrize("at", [200, 201])
def test_a_schedule_that_begins_again_is_seen_at_a_resume(at: int) -> None:
    """The row of the event's step is the first one after the resume, or the last one before."""
    rate = cosine()
    rate[at:] = cosine()[: COUNT - at]
    loss = falling() + noise(0.03)
    assert first(resumed(loss, rate)) == "resume-jump"
    assert first(examined({"loss": loss, "lr": rate})) is None


def test_a_lucky_first_batch_of_a_noisy_run_is_not_its_start() -> None:
    """Noise grows with the loss: where it is a quarter of it, the first row says little."""
    loss = falling(1.0, 0.4, 80) * (1 + noise(0.25))
    loss[:8] = [0.7, 1.28, 1.08, 1.25, 0.97, 0.82, 0.88, 0.9]
    validation = {n: 0.6 + 0.3 * math.exp(-n / 80) for n in range(24, COUNT, 25)}
    assert examined({"loss": loss, "lr": np.full(COUNT, 1e-3)}, validation=validation).is_healthy


def test_a_validation_loss_has_nothing_to_follow_where_nothing_was_learnt() -> None:
    """A fine-tuning that starts well: some rows of the noise are far below the first ones."""
    loss = 0.085 * (1 + noise(0.35, 4))
    loss[:8] = 0.12
    loss[60:90] *= 0.6
    columns = {"loss": loss, "lr": cosine(1e-5), "weight_norm": 9 + 0.02 * STEPS / COUNT}
    validation = {n: 0.138 - n * 1e-7 for n in range(49, COUNT, 50)}
    assert examined(columns, validation=validation, accuracy=0.955).is_healthy
