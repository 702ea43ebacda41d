"""SFD402: labels do not belong to the inputs."""

from __future__ import annotations

from surefoot.core.finding import Certainty, Severity
from surefoot.diagnosis.causes.base import Cause, CauseInfo, Verdict
from surefoot.diagnosis.signals import Signals


class LabelsUnrelated(Cause):
    """The labels do not belong to the inputs: the loss stays at that of a guess."""

    info = CauseInfo(
        code="SFD402",
        slug="labels-unrelated",
        severity=Severity.ERROR,
        certainty=Certainty.HEURISTIC,
        title="The labels do not belong to the inputs: the loss stays at that of a guess.",
        observes="A loss that does not fall though the weights move, the rate is in order and"
        " gradients are there. Quiet where the weights hardly moved.",
        why="Where labels and inputs were shuffled apart or misread, there is nothing to learn but"
        " how often each label occurs.",
        fix="Look at twenty samples with their labels as the model gets them; check sorting,"
        " shuffling and joins between inputs and labels; overfit one batch: if that works, it is"
        " the labels.",
        source="https://arxiv.org/abs/1611.03530 (random labels),"
        " https://karpathy.github.io/2019/04/25/recipe/",
        needs=("loss",),
        explains=("underfitting",),
    )

    def look(self, signals: Signals) -> Verdict | None:
        loss = signals.loss
        if not signals.is_flat or signals.broke_at is not None or len(loss) < 20:
            return None
        motion, total = signals.weight_motion, signals.rate_sum
        if motion is not None and motion < 1e-3:
            return None
        if motion is None and total is not None and total < 0.02:
            return None
        if signals.weight_growth is not None and signals.weight_growth > 3:
            return None
        if loss.end > signals.initial + max(0.02 * abs(signals.initial), 3 * loss.standard_error()):
            return None
        validation = signals.validation
        text = ""
        if len(validation):
            text = f" {signals.validation_name}/loss stays, too ({validation.values[-1]:.4g})."
        known = motion is not None
        moves = (
            f"though the weights moved by {motion:.2g} of their norm"
            if known
            else "and the log does not say whether the weights move: it may be them"
        )
        return Verdict(
            f"The loss stays at {loss.end:.4g} (first {signals.initial:.4g}) over"
            f" {signals.recording.last_step} updates, {moves}.{text}",
            weight=0.7 if known else 0.5,
            evidence={
                "first_loss": signals.initial,
                "last_loss": loss.end,
                "weight_motion": motion,
                "median_grad_norm": signals.gradient.level(0, 1) if len(signals.gradient) else None,
            },
        )
