"""Weights that were thrown, grow in peace or never move, gradients out of scale: look-alikes."""

from __future__ import annotations

import math

import numpy as np
import pytest

from diagnosis.made_up import COUNT, STEPS, cosine, examined, falling, first, noise


@pytest.mark.parametrize("growth", [1.4, 3.0])
@pytest.mark.parametrize("learns", [True, False])
def test_weights_thrown_by_the_first_updates(learns: bool, growth: float) -> None:
    """At a rate that is kept and with nothing learnt, it is too high for all of the run."""
    weights = 10.0 * (1 + (growth - 1) * (1 - np.exp(-STEPS / 4.0)))
    loss = (falling(2.3, 1.1) if learns else np.full(COUNT, 2.3)) + noise(0.03)
    loss[1:4] = 9.0 if growth > 2 else 2.3
    rate = cosine(0.1) if learns else np.full(COUNT, 0.1)
    found = first(examined({"loss": loss, "lr": rate, "weight_norm": weights}))
    if growth < 2:
        assert found == (None if learns else "labels-unrelated")
    else:
        assert found == ("rate-too-high-at-start" if learns else "rate-too-high")


@pytest.mark.parametrize("sway", [0.0, 0.1])
def test_weights_that_grow_in_peace_have_not_run_away(sway: float) -> None:
    """Small weights grow manifold at any rate; if the rate is too high, evaluations tell."""
    loss = falling(4.5, 2.7, 30) + noise(0.05)
    validation = {n: 2.7 + sway * (-1) ** (n // 20) for n in range(59, COUNT, 20)}
    columns = {"loss": loss, "lr": np.full(COUNT, 1e-2), "weight_norm": 3 + 0.05 * STEPS}
    found = first(examined(columns, validation=validation))
    assert (found in ("rate-too-high-late", "rate-too-high")) is (sway > 0)


@pytest.mark.parametrize("symbols", [18, 96])
def test_a_task_of_few_symbols_may_have_no_noise(symbols: int) -> None:
    """Sorting can be learnt; no text can be foretold to the last letter."""
    loss = falling(math.log(symbols), 0.002, 20)
    facts = {"task": "generation", "num_classes": symbols}
    validation = {n: float(loss[n]) for n in range(19, COUNT, 20)}
    found = examined({"loss": loss, "lr": cosine()}, validation=validation, facts=facts)
    assert first(found) == (None if symbols == 18 else "target-leaks")


def test_where_every_update_overflows_nothing_moves() -> None:
    columns = {
        "loss": 4.5 + noise(0.01),
        "lr": cosine(),
        "grad_norm": np.full(COUNT, np.inf),
        "weight_norm": np.full(COUNT, 19.0),
        "loss_scale": np.full(COUNT, 2.0**17),
    }
    found = examined(columns, facts={"precision": "fp16"})
    assert [finding.slug for finding in found.findings] == ["half-precision-overflow"]


@pytest.mark.parametrize("frequencies", [True, False])
def test_weights_that_only_decay_learn_nothing(frequencies: bool) -> None:
    loss = falling(4.6, 3.1, 8) + noise(0.08)
    weights = 20 - 0.002 * STEPS if frequencies else 20 + 0.01 * STEPS
    columns = {"loss": loss, "lr": cosine(), "weight_norm": weights}
    validation = dict.fromkeys(range(39, COUNT, 20), 3.1)
    found = examined(columns, validation=validation, facts={"num_classes": 96})
    assert (first(found) == "labels-unrelated") is frequencies


@pytest.mark.parametrize("rests", [True, False])
def test_a_mean_that_was_found_at_once_is_all_that_a_dead_network_learns(rests: bool) -> None:
    """With squared errors of one-hot answers a first loss of any size falls to their variance."""
    loss = falling(0.26, 0.09, 2) + noise(0.001)
    columns = {
        "loss": loss,
        "lr": np.full(COUNT, 0.5),
        "grad_norm": 0.005 + falling(0.27, 0.0, 2),
        "weight_norm": 13 + (1e-4 if rests else 0.01) * STEPS,
    }
    validation = dict.fromkeys(range(9, COUNT, 10), 0.09)
    accuracy = {n: 0.10 + 0.02 * (n % 20 == 9) for n in validation}
    found = examined(columns, validation=validation, accuracy=accuracy, facts={"num_classes": 10})
    assert (first(found) == "vanishing-gradients") is rests


@pytest.mark.parametrize("steady", [20.0, 2.0])
def test_gradients_out_of_scale_to_the_end_explode_without_a_spike(steady: float) -> None:
    columns = {
        "loss": 1.8 + noise(0.05),
        "lr": np.full(COUNT, 3e-4),
        "grad_norm": steady * 1.8 * np.exp(noise(0.2)),
        "weight_norm": 30.0 + 1e-4 * STEPS,
    }
    found = first(examined(columns, facts={"num_classes": 6}))
    assert (found == "exploding-gradients") is (steady == 20.0)


@pytest.mark.parametrize("begins", [2.2, 4.5])
def test_a_gentle_fine_tuning_falls_in_a_line(begins: float) -> None:
    loss = begins * (1 - 0.1 * STEPS / COUNT) + noise(0.03)
    columns = {"loss": loss, "lr": np.full(COUNT, 1e-4), "weight_norm": 25 + 1e-4 * STEPS}
    found = first(examined(columns, facts={"num_classes": 96}))
    assert found == (None if begins == 2.2 else "rate-too-low")


@pytest.mark.parametrize("begins", [4.5, 2.2])
def test_no_batch_is_harder_than_a_guess(begins: float) -> None:
    """One row far above log(C) right after the start is the doing of an update."""
    loss = falling(begins, 1.9) + noise(0.05)
    loss[2] = 8.7 if begins > 4 else 4.3
    columns = {"loss": loss, "lr": cosine(0.5)}
    found = first(examined(columns, facts={"num_classes": 96}))
    assert found == ("rate-too-high-at-start" if begins == 4.5 else None)


@pytest.mark.parametrize("kept", [True, False])
def test_a_pattern_of_the_data_stays_as_large(kept: bool) -> None:
    """A curve that learns bends alike from one epoch to the next, but ever less."""
    place = STEPS % 100 / 100
    pattern = 0.2 * np.sin(8 * np.pi * place) * (1 if kept else 0.15 ** (STEPS // 100))
    columns = {
        "loss": falling(2.3, 0.8, 150) + pattern + noise(0.005),
        "lr": cosine(),
        "epoch": np.floor(STEPS / 100),
    }
    found = first(examined(columns))
    assert found == ("data-not-shuffled" if kept else None)


@pytest.mark.parametrize("at_first", [True, False])
def test_most_of_it_in_the_first_updates_is_no_line(at_first: bool) -> None:
    """Noisy labels: what can be learnt is learnt soon, the rest little by little."""
    done = STEPS / COUNT
    loss = 1.38 - 0.13 * done - (0.18 * (1 - np.exp(-STEPS / 10)) if at_first else 0.0)
    columns = {"loss": loss + noise(0.01), "lr": np.full(COUNT, 1e-4)}
    columns["weight_norm"] = 7 + 5e-4 * STEPS
    found = first(examined(columns, facts={"num_classes": 4}))
    assert found == (None if at_first else "rate-too-low")


@pytest.mark.parametrize("differ", [0.002, 0.05])
def test_a_task_may_have_its_noise_at_the_floor_of_a_softmax(differ: float) -> None:
    """The floor for 8 classes is 1.274; pressed against it, batches hardly differ."""
    columns = {"loss": falling(math.log(8), 1.29, 60) + noise(differ), "lr": np.full(COUNT, 1e-3)}
    found = first(examined(columns, facts={"num_classes": 8, "task": "generation"}))
    assert found == ("wrong-loss" if differ < 0.01 else None)
