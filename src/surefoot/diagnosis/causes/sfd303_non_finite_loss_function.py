"""SFD303: log(0), sqrt(0) or 0/0 inside the loss."""

from __future__ import annotations

import numpy as np

from surefoot.core.finding import Certainty, Severity
from surefoot.diagnosis.causes.base import Cause, CauseInfo, Verdict
from surefoot.diagnosis.signals import Signals


class NonFiniteLossFunction(Cause):
    """The loss function divides by zero, or takes log or sqrt of it."""

    info = CauseInfo(
        code="SFD303",
        slug="non-finite-loss-function",
        severity=Severity.ERROR,
        certainty=Certainty.STRONG,
        title="The loss function divides by zero, or takes log or sqrt of it.",
        observes="What breaks first: an infinite loss, or a finite loss with a gradient that is"
        " not; or NaN on samples that had gone through before. Quiet where loss or gradients had"
        " grown before, and for overflow that a loss scale meets.",
        why="log(0) is infinite; sqrt has an infinite slope at 0 and 0 times that is NaN: the loss"
        " is still fine when its gradient is not.",
        fix="Work on scores, not on probabilities (cross_entropy, log_softmax,"
        " binary_cross_entropy_with_logits); add a small number inside log and sqrt, not outside;"
        " torch.autograd.set_detect_anomaly names the operation.",
        source="https://docs.pytorch.org/docs/stable/generated/torch.nn.functional.log_softmax.htm"
        " l",
        needs=("loss",),
    )

    def look(self, signals: Signals) -> Verdict | None:
        broke = signals.broke_at
        if broke is None or signals.inputs_are_finite is False:
            return None
        if signals.growth_before_break > 3:
            return None
        value, norm = signals.at("loss", broke), signals.at("grad_norm", broke)
        if value is None:
            return None
        step = signals.step_of_row(broke)
        before = signals.before_row("loss", broke)
        evidence = {
            "step": step,
            "loss": value,
            "grad_norm": norm,
            "loss_before": float(before[-1]) if len(before) else None,
        }
        last = f"just before it was {before[-1]:.4g}" if len(before) else "it is the first row"
        if np.isinf(value):
            return Verdict(
                f"The loss is infinite at step {step}; {last}, and gradients were in order: as"
                f" log(0)"
                " or a division by zero gives.",
                weight=0.87,
                evidence=evidence,
            )
        if np.isfinite(value):
            return Verdict(
                f"At step {step} the loss is {value:.4g} and its gradient is not finite: a function"
                f" with"
                " an infinite slope there, such as sqrt(0) or a norm of zeros.",
                weight=0.87,
                evidence=evidence,
            )
        if signals.inputs_are_finite:
            return Verdict(
                f"The loss is NaN at step {step} on inputs that are finite; {last}: as 0/0 or"
                " 0 times log(0) gives.",
                weight=0.87,
                evidence=evidence,
            )
        return Verdict(
            f"The loss is NaN at step {step}; {last}: as 0/0 or 0 times log(0) gives. Data that are"
            " not finite would look the same.",
            weight=0.7,
            evidence=evidence,
            certainty=Certainty.HEURISTIC,
        )
