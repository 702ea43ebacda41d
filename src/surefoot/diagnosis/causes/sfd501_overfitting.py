"""SFD501: the model learns the training data by heart."""

from __future__ import annotations

from surefoot.core.finding import Certainty, Severity
from surefoot.diagnosis.causes.base import Cause, CauseInfo, Verdict
from surefoot.diagnosis.curve import bend, straightness
from surefoot.diagnosis.signals import Signals

FEWEST_EVALUATIONS = 4
RISE = 0.15
"""Share of what the validation loss had gained that it has lost again since its best."""
TURNED = 0.2
"""Share of its best by which it has risen since, where it rises without a break."""
STEADY = 0.85
FITTED = 0.2
"""Share of the best validation loss that the train loss has come to, where the turn is clear though
evaluations are noisy."""


class Overfitting(Cause):
    """Validation loss turns and rises while the train loss goes on falling."""

    info = CauseInfo(
        code="SFD501",
        slug="overfitting",
        severity=Severity.WARNING,
        certainty=Certainty.STRONG,
        title="The validation loss turned and rises while the train loss goes on falling.",
        observes="The best validation loss, what came after it, and the train loss over the same"
        " stretch. Quiet where the rise is within the noise of the evaluations, where the train"
        " loss rises too, or where the validation loss had not followed before.",
        why="What the model learns after the turn is true of the training samples only.",
        fix="Use the checkpoint of the best evaluation and stop there (early_stopping); then more"
        " data or augmentation, more dropout or weight decay, a smaller model.",
        source="https://www.deeplearningbook.org/contents/regularization.html (7.8)",
        needs=("loss", "validation loss"),
        explains=("exploding-gradients",),
    )

    def look(self, signals: Signals) -> Verdict | None:
        validation, loss = signals.validation, signals.loss
        if len(validation) < FEWEST_EVALUATIONS or len(loss) < FEWEST_EVALUATIONS:
            return None
        if signals.relative_drop < 0.1:
            return None
        values = validation.values
        best_at = int(values.argmin())
        after = values[best_at + 1 :]
        if len(after) < 2:
            return None
        best = float(values[best_at])
        last = float(sum(values[-2:]) / 2)
        gained = max(float(values[0]), signals.initial) - best
        rise = last - best
        far = rise > RISE * gained or (rise > TURNED * best and straightness(after) > STEADY)
        clear = rise > (2 if loss.end < FITTED * best else 4) * bend(values)
        if gained <= 0 or not signals.follows_first or not clear or not far:
            return None
        turn = validation.step(best_at)
        before = loss.values[(loss.series.steps <= turn)][-max(5, len(loss) // 20) :]
        if not len(before) or loss.end >= float(sum(before) / len(before)) - loss.noise:
            return None
        return Verdict(
            f"{signals.validation_name}/loss was best, {best:.4g}, at step {turn} and is {last:.4g}"
            f" at step {validation.step(-1)}; over the same steps the train loss fell from"
            f" {sum(before) / len(before):.4g} to {loss.end:.4g}.",
            weight=0.85,
            evidence={
                "best_validation_loss": best,
                "best_step": turn,
                "last_validation_loss": last,
                "train_loss_then": float(sum(before) / len(before)),
                "train_loss_now": loss.end,
            },
        )
