"""SFD202: the gradient norm is near zero while the loss is high."""

from __future__ import annotations

import numpy as np

from surefoot.core.finding import Certainty, Severity
from surefoot.diagnosis.causes.base import Cause, CauseInfo, Verdict
from surefoot.diagnosis.signals import Signals

FALLEN = 0.03
"""Share of its highest level to which a norm that vanishes has fallen."""
QUIET = 0.12
"""The same, where the loss stands so still that batches make no difference any more."""
LOST = 0.2
"""The same, where all that was learnt is lost again."""
STILL = 0.005
"""Noise over level of such a loss."""
GUESSING = 0.1
"""Accuracy, from 0 for a guess to 1, of a model that has learnt nothing."""
MEAN_FOUND = 0.06
"""Gradient norm of the later part over that of the first updates, where they found a mean."""
AT_REST = 0.02
"""Share of their norm by which weights move at most that get no gradient."""
STUCK = 1e-3
"""Share of their norm by which weights have moved that no gradient reaches."""
TINY = 0.2
"""Gradient norm times weight norm over the loss: moving every weight by all of its size would
change the loss by so small a share."""
LOST_ON_THE_WAY = 1e-4
"""Share of one layer's gradient norm that is next to nothing for another's."""


class VanishingGradients(Cause):
    """The gradient norm is near zero while the loss stays high."""

    info = CauseInfo(
        code="SFD202",
        slug="vanishing-gradients",
        severity=Severity.WARNING,
        certainty=Certainty.STRONG,
        title="The gradient norm is near zero while the loss stays high.",
        observes="The gradient norm against its own past, and against loss and weight norm, while"
        " the loss is flat, and whether batches make a difference to it still. Quiet where the loss"
        " is low, and where the norm is exactly zero.",
        why="Saturated activations, dead units or many layers without a shortcut let next to"
        " nothing through: the first layers get no gradient, so nothing is learnt.",
        fix="ReLU or GELU in place of sigmoid and tanh; residual connections and normalisation; He"
        " or Xavier initialisation; look at the norms of single layers.",
        source="https://proceedings.mlr.press/v9/glorot10a.html (deep layers that saturate)",
        needs=(
            "loss",
            "grad_norm",
        ),
        explains=(
            "labels-unrelated",
            "rate-too-low",
            "underfitting",
            "rate-too-high-late",
        ),
    )

    def look(self, signals: Signals) -> Verdict | None:
        loss, gradient = signals.loss, signals.gradient
        if not signals.has_shape or len(gradient) < 10 or signals.broke_at is not None:
            return None
        if not gradient.values.any():
            return None
        if signals.weight_motion == 0.0 and not signals.gradient_is_tiny:
            return None
        late = float(np.median(gradient.part(0.7, 1)))
        highest = float(gradient.smooth.max())
        sensitivity = signals.sensitivity
        still = loss.level(0.6, 0.8) - loss.end < max(
            0.02 * abs(signals.initial), 3 * loss.standard_error()
        )
        unsure = max(0.1 * signals.initial, 3 * signals.initial_error)
        high = 0.5 * signals.initial < loss.end < signals.initial + unsure
        # A first loss of any size says nothing where the answers are a guess's to the end.
        guesses = signals.skill is not None and signals.skill < GUESSING
        if not still or not (high or (guesses and loss.end < signals.initial + unsure)):
            return None
        evidence = {
            "last_grad_norm": late,
            "highest_grad_norm": highest,
            "last_loss": loss.end,
            "sensitivity": sensitivity,
        }
        if guesses and _rests(signals):
            # The first updates have found the mean of all answers, and nothing after them.
            highest = max(highest, float(np.median(gradient.values[:3])))
            learnt_mean = late < MEAN_FOUND * highest
        else:
            learnt_mean = False
        fell = late < (QUIET if loss.noise < STILL * loss.end else FALLEN) * highest
        tiny = sensitivity < TINY if sensitivity is not None else late < TINY / 20 * abs(loss.end)
        learnt = loss.lowest < 0.85 * signals.initial and loss.end > 0.93 * signals.initial
        if learnt and loss.noise < 0.01 * loss.end:
            fell = late < LOST * highest
        if fell or learnt_mean or late == 0.0:
            return Verdict(
                f"The gradient norm fell from {highest:.3g} to {late:.3g} while the loss stays at"
                f" {loss.end:.4g} (first {signals.initial:.4g}).",
                weight=0.86,
                evidence=evidence,
            )
        layers = signals.recording.family("grad_norm")
        norms = {name: series.finite.values for name, series in layers.items()}
        levels = {name: float(np.median(v)) for name, v in norms.items() if len(v)}
        if len(levels) > 1 and min(levels.values()) < LOST_ON_THE_WAY * max(levels.values()):
            first, last = min(levels, key=levels.__getitem__), max(levels, key=levels.__getitem__)
            return Verdict(
                f"Of the gradient, {levels[last]:.3g} at {last}, {levels[first]:.3g} arrives at"
                f" {first}, while the loss stays at {loss.end:.4g} (first {signals.initial:.4g}).",
                weight=0.88,
                evidence={**evidence, **{f"grad_norm/{n}": v for n, v in levels.items()}},
            )
        motion = signals.weight_motion
        stuck = motion is not None and motion < STUCK
        if tiny and (signals.is_flat_but_for_noise or stuck):
            return Verdict(
                f"The gradient norm is {late:.3g} from the beginning, next to nothing for a loss of"
                f" {loss.end:.4g} that does not move.",
                weight=0.84,
                evidence=evidence,
            )
        return None


def _rests(signals: Signals) -> bool:
    """Whether the weights, and the evaluations, have hardly moved since the first tenth."""
    norms, values = signals.recording["weight_norm"].finite.values, signals.validation.values
    later = norms[len(norms) // 10 :]
    if len(later) < 5 or len(values) < 5:
        return False
    stands = float(np.ptp(values[1:])) < 0.15 * abs(float(values[0]))
    return stands and float(np.ptp(later)) < AT_REST * float(later[0])
