"""SFD103: the rate suits the beginning, not the end."""

from __future__ import annotations

import numpy as np

from surefoot.core.finding import Certainty, Severity
from surefoot.diagnosis.causes.base import Cause, CauseInfo, Verdict
from surefoot.diagnosis.signals import Signals

BOUNCE = 0.03
"""Share of all that the loss came down by which neighbouring evaluations bend."""


SWAY = 0.06
"""Share of their own level by which neighbouring evaluations bend, where nothing is gained."""
GAINED = 0.2
"""Share of its level that the loss still comes down over the last half at most."""
FITTING = 0.35
"""The same, of a run that is fitting its data still."""
WENT = 2.0
"""Times their norm to which weights have grown at least whose little sway tells."""
STANDS = 0.05
"""Share of what the validation loss gained that was to come in the second half at most."""


class RateTooHighLate(Cause):
    """The rate that suited the beginning is too high for the rest: the loss stalls on a noisy"
    " plateau."""

    info = CauseInfo(
        code="SFD103",
        slug="rate-too-high-late",
        severity=Severity.WARNING,
        certainty=Certainty.HEURISTIC,
        title="The rate that suited the beginning is too high for the rest: the loss stalls on a"
        " noisy plateau.",
        observes="Whether the loss stopped falling while the rate was still high; how far the"
        " weights have run (their norm), and how much evaluations bounce. Quiet where the rate had"
        " decayed.",
        why="Near a minimum the steps are longer than the valley is wide: the loss stops at the"
        " level where noise and progress are in balance, and the weights wander.",
        fix="Decay the rate (cosine to a tenth, or step decay at the plateau); the loss falls at"
        " once if this is it.",
        source="https://arxiv.org/abs/1608.03983 (SGDR), https://arxiv.org/abs/2405.18392"
        " (cooldown from a constant rate)",
        needs=(
            "loss",
            "lr",
        ),
        explains=(
            "underfitting",
            "overfitting",
            "exploding-gradients",
        ),
    )

    def look(self, signals: Signals) -> Verdict | None:
        loss = signals.loss
        if signals.gradients_explode_at_once:
            return None
        if not signals.has_shape or signals.broke_at is not None or not signals.rate_is_kept:
            return None
        if signals.relative_drop < 0.15 or len(loss) < 40 or signals.is_flat_but_for_noise:
            return None
        drop = loss.drop if loss.drop > 0 else 1e-30
        stalled = (loss.level(0.55, 0.75) - loss.level(0.8, 1.0)) / drop
        half = (loss.level(0.3, 0.5) - loss.level(0.8, 1.0)) / drop
        growth, jitter = signals.weight_growth, signals.validation_jitter
        far = growth is not None and growth > 4 and not signals.evaluations_are_steady
        bouncing = jitter > BOUNCE and _halves(signals) < FITTING
        # Of weights that have not gone far, a little sway is the noise of small batches.
        if growth is None or growth > WENT:
            bouncing = bouncing or _sways(signals) or _stands_and_sways(signals)
        most = 0.2 if far else 0.1
        if stalled > most or half > 1.5 * most + 0.05 or not (far or bouncing):
            return None
        rate = float(np.median(signals.rate.part(0.9, 1)))
        signs = [f"the weights have run to {growth:.3g} times their norm"] if far else []
        if bouncing:
            signs.append(f"evaluations bounce by {jitter:.1%} of all that was gained")
        return Verdict(
            f"The loss fell from {signals.initial:.4g} to {loss.level(0.55, 0.75):.4g} and stalls"
            f" there (last {loss.end:.4g}, noise {loss.noise:.2g}) while the rate stays at"
            f" {rate:.3g};"
            f" {' and '.join(signs)}.",
            weight=0.8 if far and bouncing else 0.72,
            evidence={
                "level_at_two_thirds": loss.level(0.55, 0.75),
                "last_loss": loss.end,
                "noise": loss.noise,
                "last_rate": rate,
                "weight_norm_growth": growth,
                "validation_jitter": jitter,
            },
        )


def _halves(signals: Signals) -> float:
    """Share of its level by which the mean train loss came down from the third quarter to the
    fourth: of a run that is fitting its data still, a good part, however small the loss."""
    third, fourth = (float(signals.loss.part(a, b).mean()) for a, b in ((0.5, 0.75), (0.75, 1)))
    return (third - fourth) / max(abs(third), 1e-30)


def _sways(signals: Signals) -> bool:
    """Whether evaluations of the later part, the same samples each time, go up and down by a good
    share of their level, having followed, while the train loss has come to a standstill."""
    loss, validation = signals.loss, signals.validation
    if len(validation) < 5:
        return False
    level = float(np.median(validation.part(0.4, 1)))
    follows = signals.initial - level > 0.5 * (signals.initial - loss.end)
    stands = abs(_halves(signals)) < GAINED
    return stands and follows and signals.validation_sway > SWAY


def _stands_and_sways(signals: Signals) -> bool:
    """Whether evaluations have come to a standstill, and go up and down by more than the little
    that a run at its floor does: on the scale of their level, and of all that was gained."""
    sways = signals.validation_sway > SWAY / 15 and signals.validation_jitter > BOUNCE / 4
    return sways and abs(_halves(signals)) < GAINED and signals.validation_left < STANDS
