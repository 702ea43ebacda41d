"""What tells look-alikes apart, on made-up columns: of each pair one is another cause, or none."""

from __future__ import annotations

import math

import numpy as np
import pytest

from diagnosis.made_up import COUNT, LOG_10, STEPS, cosine, examined, falling, first, noise
from surefoot.core.reports import Event


@pytest.mark.parametrize("is_over_early", [True, False])
def test_a_model_is_too_small_only_where_it_stood_still_before_the_rate_was_gone(
    is_over_early: bool,
) -> None:
    """A curve that comes to rest as the rate does has used its rate."""
    rate = cosine()
    done = np.cumsum(rate) / rate.sum()
    loss = 3.0 + 1.6 * np.exp(-(30 if is_over_early else 4) * done) + noise(0.03)
    validation = {
        n: 3.0 + 1.6 * math.exp(-(30 if is_over_early else 4) * done[n])
        for n in range(9, COUNT, 15)
    }
    found = examined({"loss": loss, "lr": rate}, validation=validation)
    assert first(found) == ("underfitting" if is_over_early else None)


@pytest.mark.parametrize("alone", [True, False])
def test_a_hard_batch_raises_the_gradients_of_every_tower(alone: bool) -> None:
    towers = {f"grad_norm/{name}": 1 + np.abs(noise(0.1, n)) for n, name in enumerate("abc")}
    for name, norm in towers.items():
        if name == "grad_norm/a" or not alone:
            norm[[90, 170, 260, 330]] *= 12
    if not alone:
        towers["grad_norm/a"][[120, 200, 300, 350]] *= 7
        towers["grad_norm/b"][[120, 200, 300, 350]] *= 4
        towers["grad_norm/c"][[120, 200, 300, 350]] *= 4
    found = examined({"loss": falling() + noise(0.03), "lr": cosine(), **towers})
    assert first(found) == ("one-tower-spikes" if alone else None)


@pytest.mark.parametrize("with_the_loss", [True, False])
def test_hard_batches_of_a_low_loss_are_no_explosion(with_the_loss: bool) -> None:
    """Once a loss is near nothing, single batches have many times its loss, and its gradient."""
    loss, norm = falling(end=0.02, over=20) * np.exp(noise(0.3)), falling(2.0, 0.05, 20)
    norm = norm * np.exp(noise(0.3, 1))
    hard = np.arange(150, COUNT, 12)
    norm[hard] *= 300
    if with_the_loss:
        loss[hard] *= 200
    found = examined({"loss": loss, "lr": cosine(), "grad_norm": norm})
    named = {finding.slug for finding in (*found.findings, *found.consequences)}
    assert ("exploding-gradients" in named) is not with_the_loss


@pytest.mark.parametrize("unsteady", [True, False])
@pytest.mark.parametrize("scale", [1.0, 100.0])
def test_weights_out_of_scale_are_seen_before_they_move(scale: float, unsteady: bool) -> None:
    """A steep first loss alone is that of a large model."""
    norm = scale * np.where(STEPS % 2, 3.0 if unsteady else 1.2, 1.0)
    norm = norm if unsteady else norm * falling(1.0, 0.02, 15)
    columns = {"loss": falling(3.0, 1.8) + noise(0.03), "lr": cosine(), "grad_norm": norm}
    columns["weight_norm"] = 10.0 + 0.001 * STEPS
    found = examined(columns)
    expected = "exploding-gradients" if scale == 100.0 and unsteady else None
    assert first(found) == expected


def test_one_norm_far_out_among_a_few_that_are_high_is_a_hard_batch() -> None:
    norm = 1 + np.abs(noise(0.1))
    norm[[90, 150, 230, 300, 340, 370, 390]] = 7.0
    norm[200] = 40.0
    columns = {"loss": falling() + noise(0.03), "lr": cosine(), "grad_norm": norm}
    named = {finding.slug for finding in examined(columns).findings}
    assert "exploding-gradients" not in named
    norm[[90, 150]] = 40.0
    named = {finding.slug for finding in examined(columns).findings}
    assert "exploding-gradients" in named


def test_a_first_loss_that_is_no_guess_tells_nothing_of_a_copy() -> None:
    loss = 4.0 + 1000 * np.exp(-STEPS / 3.0) + noise(0.03)
    columns = {"loss": loss, "lr": cosine(), "tokens": 512.0 * (1 + STEPS)}
    assert first(examined(columns)) != "target-leaks"


def test_a_negative_loss_that_settles_may_be_a_density() -> None:
    rate = cosine()
    done = np.cumsum(rate) / rate.sum()
    settles = {"loss": 1.0 - 3 * (1 - np.exp(-6 * done)) + noise(0.02), "lr": rate}
    goes_on = {"loss": 1.0 - 9 * done + noise(0.02), "lr": rate}
    assert examined(settles).is_healthy
    assert first(examined(goes_on)) == "wrong-loss"


@pytest.mark.parametrize("follows", [True, False])
def test_a_harder_validation_set_falls_from_higher_up(follows: bool) -> None:
    columns = {"loss": falling(2.0, 1.0, 60) + noise(0.05), "lr": cosine()}
    validation = {
        n: 2.1 + (1.0 * math.exp(-n / 60) if follows else 0.001 * n) for n in range(9, COUNT, 20)
    }
    found = examined(columns, validation=validation)
    assert first(found) == (None if follows else "validation-differs")


@pytest.mark.parametrize("seed", range(4))
def test_a_first_row_of_a_noisy_run_may_be_anything(seed: int) -> None:
    """Batches of one or two: the rate is not too high because the first of them was easy."""
    random = np.random.default_rng(seed)
    loss = falling(1.0, 0.6, 150) * random.gamma(2.0, 0.5, COUNT)
    loss[0] = 0.3
    loss[3] = 0.25
    validation = {n: 0.6 + 0.4 * math.exp(-n / 150) for n in range(19, COUNT, 20)}
    found = examined({"loss": loss, "lr": np.full(COUNT, 1e-3)}, validation=validation)
    assert first(found) not in ("rate-too-high", "rate-too-high-at-start", "labels-unrelated")


def test_evaluations_that_bounce_as_batches_do_tell_a_rate_from_labels() -> None:
    columns = {"loss": LOG_10 + noise(0.04), "lr": np.full(COUNT, 0.3)}
    shaken = {n: LOG_10 + 0.03 * (-1) ** (n // 20) for n in range(19, COUNT, 20)}
    still = {n: LOG_10 + 0.001 * (-1) ** (n // 20) for n in range(19, COUNT, 20)}
    assert first(examined(columns, validation=shaken)) == "rate-too-high"
    assert first(examined(columns, validation=still)) == "labels-unrelated"


@pytest.mark.parametrize("gradient", [9.0, 1.4])
def test_gradients_tell_weights_that_were_thrown_off_from_a_hard_batch(gradient: float) -> None:
    loss, norm = falling() + noise(0.03), 1 + np.abs(noise(0.05, 1))
    loss[1:3], norm[1:3] = [4.9, 2.6], gradient
    found = examined({"loss": loss, "lr": cosine(0.1), "grad_norm": norm})
    assert first(found) == ("rate-too-high-at-start" if gradient > 2 else None)


@pytest.mark.parametrize("columns", [("applied",), ()])
def test_fp16_without_a_scale_overflows_again_and_again(columns: tuple[str, ...]) -> None:
    norm, lost = 1 + np.abs(noise(0.1, 1)), np.arange(10, COUNT, 3)
    norm[lost] = np.inf
    more = {name: np.isfinite(norm).astype(float) for name in columns}
    log = {"loss": falling() + noise(0.03), "lr": cosine(), "grad_norm": norm, **more}
    assert first(examined(log, facts={"precision": "fp16"})) == "half-precision-overflow"


def test_a_few_large_batches_among_small_ones_are_uneven() -> None:
    items = np.tile([1.0, 1, 1, 2, 4, 64], COUNT)[:COUNT]
    loss = falling() + noise(0.5) / np.sqrt(items)
    assert first(examined({"loss": loss, "lr": cosine(), "weight": items})) == "uneven-batches"
    short = np.where(STEPS % 20 == 19, 4.0, 64.0)  # The last batch of each epoch.
    loss = falling() + noise(0.5) / np.sqrt(short)
    assert examined({"loss": loss, "lr": cosine(), "weight": short}).is_healthy


@pytest.mark.parametrize(("norm", "slug"), [(1e-4, "vanishing"), (0.5, "weights")])
def test_gradients_of_nothing_move_no_weight_though_the_optimizer_holds_them(
    norm: float, slug: str
) -> None:
    columns = {
        "loss": np.full(COUNT, 1.7918),
        "lr": cosine(0.01),
        "grad_norm": norm * (1 + np.abs(noise(0.3, 1))),
        "weight_norm": np.full(COUNT, 26.85),
    }
    found = examined(columns, validation=dict.fromkeys(range(49, COUNT, 50), 1.7918))
    assert str(first(found)).startswith(slug)


def test_weights_move_where_their_norm_does_whatever_an_evaluation_rounds_to() -> None:
    columns = {
        "loss": np.full(COUNT, 1.7918),
        "lr": cosine(0.05),
        "grad_norm": 6e-4 * (1 + np.abs(noise(0.1, 1))),
        "weight_norm": 3.5225 + 1e-5 * STEPS / COUNT,
    }
    found = examined(columns, validation=dict.fromkeys(range(49, COUNT, 50), 1.7918))
    assert first(found) == "vanishing-gradients"


@pytest.mark.parametrize("batches_differ", [False, True])
def test_gradients_fade_where_a_squared_error_is_that_of_constants(batches_differ: bool) -> None:
    """What fits its data up to their noise has small gradients, too; its batches differ."""
    columns = {
        "loss": falling(0.25, 0.1389, 12) + noise(0.01 if batches_differ else 1e-4),
        "lr": cosine(0.4),
        "grad_norm": falling(0.25, 0.012, 15),
    }
    assert first(examined(columns)) == (None if batches_differ else "vanishing-gradients")


@pytest.mark.parametrize("passes", [0.2, 12.0])
def test_samples_that_are_new_are_not_known_by_heart(passes: float) -> None:
    loss = falling(4.6, 0.25, 40) + np.abs(noise(0.02))
    columns = {"loss": loss, "lr": cosine(), "epoch": passes * STEPS / COUNT}
    validation = {n: 2.7 + 2 * (n / COUNT) for n in range(24, COUNT, 25)}
    found = examined(columns, validation=validation, facts={"task": "generation"})
    assert first(found) == ("target-leaks" if passes < 1 else "overfitting")


def test_two_broken_batches_side_by_side_are_seen() -> None:
    loss = falling(4.6, 2.3) + noise(0.2)
    loss[[356, 359]] = [6.1, 5.8]
    found = examined({"loss": loss, "lr": cosine()})
    assert first(found) == "bad-batch"
    assert found.findings[0].evidence["steps"] == [356, 359]


@pytest.mark.parametrize("fitted", [True, False])
def test_a_turn_among_noisy_evaluations_is_clear_where_the_data_are_fitted(fitted: bool) -> None:
    sway = noise(0.06, 2)
    values = [1.15 + 0.6 * math.exp(-n / 40) + 0.0006 * n + sway[n] for n in range(9, COUNT, 16)]
    validation = dict(zip(range(9, COUNT, 16), values, strict=True))
    columns = {"loss": falling(1.8, 0.01 if fitted else 0.8) * np.exp(noise(0.05))}
    found = examined({**columns, "lr": np.full(COUNT, 0.02)}, validation=validation)
    assert (first(found) == "overfitting") is fitted


@pytest.mark.parametrize("faster", [True, False])
def test_weights_run_after_a_resume_without_moments(faster: bool) -> None:
    weights = 10 + 0.003 * STEPS + (0.04 * np.maximum(STEPS - 200, 0) if faster else 0.0)
    columns = {"loss": falling() + noise(0.1), "lr": cosine(), "weight_norm": weights}
    found = examined(columns, events=(Event("resume", 200, "resumed"),))
    assert first(found) == ("resume-jump" if faster else None)


@pytest.mark.parametrize("moves", [True, False])
def test_who_learns_only_how_often_a_token_occurs_moves_no_weight_afterwards(moves: bool) -> None:
    """A model too small moves its weights still; both curves stand still, and together."""
    weights = 16 + falling(0.0, 1.0, 15) + (STEPS / 100 if moves else 0.0)
    columns = {"loss": falling(4.6, 3.1, 10) + noise(0.1), "lr": cosine(), "weight_norm": weights}
    validation = {n: 3.1 + 1.5 * math.exp(-n / 10) for n in range(9, COUNT, 15)}
    found = examined(columns, validation=validation)
    assert first(found) == ("underfitting" if moves else "labels-unrelated")


@pytest.mark.parametrize(("start", "slug"), [(1.8, "underfitting"), (4.6, None)])
def test_a_loss_of_two_thirds_of_a_guess_is_high_for_few_classes_only(
    start: float, slug: str | None
) -> None:
    """Among many tokens it is where language models end."""
    share = 0.68 + 0.3 * np.exp(-STEPS / 55)
    loss = start * share + noise(0.02 * start)
    validation = {n: float(start * share[n]) for n in range(9, COUNT, 15)}
    assert first(examined({"loss": loss, "lr": cosine()}, validation=validation)) == slug


def test_a_guess_among_known_classes_needs_less_motion_to_be_unrelated_labels() -> None:
    columns = {
        "loss": LOG_10 + noise(0.01),
        "lr": np.full(COUNT, 1e-3),
        "weight_norm": 6.8 + 0.012 * STEPS / COUNT,
    }
    assert first(examined(columns, facts={"num_classes": 10})) == "labels-unrelated"
    assert first(examined(columns)) != "labels-unrelated"


def test_evaluations_that_fall_ever_slower_do_not_sway() -> None:
    """Few of them bend as much as they fall; that is no bouncing of weights."""
    loss = falling(0.81, 0.42, 60) + noise(0.1)
    steps = range(59, COUNT, 60)
    columns = {"loss": loss, "lr": np.full(COUNT, 1e-3)}
    convex = dict(zip(steps, [0.712, 0.648, 0.617, 0.602, 0.595, 0.591], strict=True))
    swaying = dict(zip(steps, [0.712, 0.61, 0.66, 0.59, 0.65, 0.6], strict=True))
    assert examined(columns, validation=convex).is_healthy
    assert first(examined(columns, validation=swaying)) == "rate-too-high-late"


@pytest.mark.parametrize("every", [1, 5])
def test_sums_of_gradients_are_seen_in_a_log_that_begins_later(every: int) -> None:
    """Under a warm-up the norm grows slowly at first, and goes on growing."""
    growth = 4 * (1 + 3e-3 * STEPS + 4e-4 * STEPS**1.7)
    columns = {"loss": falling(1.7, 0.05, 120), "lr": cosine(), "grad_norm": growth}
    thinned = {name: column[every - 1 :: every] for name, column in columns.items()}
    found = examined({**thinned, "step": STEPS[every - 1 :: every].astype(float)})
    assert first(found) == "gradients-not-cleared"


def test_a_loss_pressed_against_the_floor_after_a_softmax_needs_no_first_row() -> None:
    floor = math.log(math.e + 2) - 1
    loss = falling(0.94, floor + 0.001, 25) + np.abs(noise(1e-4))
    columns = {"loss": loss, "lr": cosine(), "grad_norm": falling(0.5, 0.01, 20)}
    assert first(examined(columns, facts={"num_classes": 3})) == "wrong-loss"
    above = examined({**columns, "loss": loss + 0.1}, facts={"num_classes": 3})
    assert first(above) != "wrong-loss"


@pytest.mark.parametrize(("classes", "slug"), [(7, "rate-too-low"), (None, None)])
def test_evaluations_in_a_straight_line_from_a_guess_are_a_rate_too_low(
    classes: int | None, slug: str | None
) -> None:
    """From anywhere else it may be a gentle fine-tuning."""
    rate = cosine(7e-4)
    done = np.cumsum(rate) / rate.sum()
    columns = {"loss": 1.9459 - 0.005 * done + noise(0.01), "lr": rate}
    validation = {n: float(1.9459 - 0.005 * done[n]) for n in range(9, COUNT, 13)}
    facts = {"num_classes": classes} if classes else {}
    found = examined(columns, validation=validation, facts=facts)
    assert (first(found) == "rate-too-low") is (slug is not None)


@pytest.mark.parametrize("jumps", [True, False])
def test_weights_that_are_others_at_a_resume_are_seen(jumps: bool) -> None:
    weights = 10 + 0.003 * STEPS + (1.0 * (STEPS >= 200) if jumps else 0.0)
    columns = {"loss": falling() + noise(0.1), "lr": cosine(), "weight_norm": weights}
    found = examined(columns, events=(Event("resume", 200, "resumed"),))
    assert first(found) == ("resume-jump" if jumps else None)


def test_a_validation_loss_that_falls_all_along_follows_though_the_train_loss_is_ahead() -> None:
    loss = 0.053 - 0.018 * STEPS / COUNT + noise(0.004)
    loss[50:75] -= 0.015
    validation = {n: 0.0533 - 0.0095 * n / COUNT for n in range(4, COUNT, 10)}
    assert examined({"loss": loss, "lr": cosine(1e-4)}, validation=validation).is_healthy


@pytest.mark.parametrize("decays", [True, False])
def test_a_rate_that_is_kept_has_nothing_left_to_bring(decays: bool) -> None:
    """As its rate decays a small model gains a little yet; at a rate that is kept who gains as much
    is learning still."""
    rate = cosine() if decays else np.full(COUNT, 1e-3)
    done = np.cumsum(rate) / rate.sum()
    share = 0.62 + 0.38 * np.exp(-done / 0.14)
    loss = 4.6 * share + noise(0.05)
    validation = {n: float(4.6 * share[n]) for n in range(9, COUNT, 15)}
    found = examined({"loss": loss, "lr": rate}, validation=validation)
    assert first(found) == ("underfitting" if decays else None)


def test_a_jump_that_is_over_soon_is_seen_among_noisy_batches() -> None:
    loss = falling(1.6, 0.5) + noise(0.2)
    loss[200:] += 1.5 * np.exp(-np.arange(200) / 5)
    columns = {"loss": loss, "lr": cosine()}
    found = examined(columns, events=(Event("resume", 200, "resumed"),))
    assert first(found) == "resume-jump"


@pytest.mark.parametrize(
    ("columns", "cause"),
    [
        ({"data_seconds": 0.6, "step_seconds": 1.0}, "waiting-for-data"),
        ({"data_seconds": 0.1, "step_seconds": 1.0}, None),
        ({"data_seconds": 0.6, "compute_seconds": 0.4}, "waiting-for-data"),
        ({"data_wait_share": 0.6}, "waiting-for-data"),
        ({"data_wait_share": 60.0}, "waiting-for-data"),
        ({"data_wait": 0.6, "gpu_util": 35.0}, "waiting-for-data"),
        ({"data_wait": 0.05, "gpu_util": 35.0}, "device-underused"),
        ({"data_wait": 0.6}, None),
    ],
)
def test_a_wait_is_a_share_of_something(columns: dict[str, float], cause: str | None) -> None:
    constant = {name: np.full(COUNT, value) for name, value in columns.items()}
    assert first(examined({"loss": falling() + noise(0.03), "lr": cosine(), **constant})) == cause


@pytest.mark.parametrize("name", ["memory_allocated_gb", "rss_mb"])
def test_the_memory_of_the_host_leaks_too(name: str) -> None:
    columns = {"loss": falling() + noise(0.03), "lr": cosine(), name: 2000 + 5.0 * STEPS}
    assert first(examined(columns)) == "memory-leak"


@pytest.mark.parametrize(
    ("columns", "cause"),
    [
        ({"nonfinite_inputs": 3.0}, "non-finite-data"),
        ({"nonfinite_inputs": 0.0}, "non-finite-loss-function"),
        ({"input_absmax": float("nan")}, "non-finite-data"),
        ({"input_absmax": 4.0}, "non-finite-loss-function"),
    ],
)
def test_what_the_inputs_were_tells_where_a_nan_is_from(
    columns: dict[str, float], cause: str
) -> None:
    loss = falling() + noise(0.03)
    loss[200:] = np.nan
    found = {name: np.zeros(COUNT) for name in columns}
    for name, value in columns.items():
        found[name][200:] = value
    assert first(examined({"loss": loss, "lr": cosine(), **found})) == cause


@pytest.mark.parametrize(("lowest", "cause"), [(1e-9, "vanishing-gradients"), (0.05, None)])
def test_a_gradient_may_be_lost_on_its_way_through_the_layers(
    lowest: float, cause: str | None
) -> None:
    norm = 0.2 + np.abs(noise(0.02))
    layers = {"grad_norm/first": lowest * norm, "grad_norm/head": norm}
    rows = {"loss": LOG_10 + noise(0.02), "lr": cosine(), "grad_norm": norm, **layers}
    assert (first(examined(rows)) == "vanishing-gradients") is (cause is not None)
