"""SFD203: the weights stay what they were."""

from __future__ import annotations

from surefoot.core.finding import Certainty, Severity
from surefoot.diagnosis.causes.base import Cause, CauseInfo, Verdict
from surefoot.diagnosis.signals import SHORTEST, Signals


class WeightsDoNotMove(Cause):
    """The weights stay what they were."""

    info = CauseInfo(
        code="SFD203",
        slug="weights-do-not-move",
        severity=Severity.ERROR,
        certainty=Certainty.PROOF,
        title="The weights stay what they were.",
        observes="A weight norm, or a validation loss, that is the same to the last digit over the"
        " run; a gradient norm of exactly zero.",
        why="No gradient reaches them (a detached tensor, requires_grad=False, no_grad around the"
        " forward), or the optimizer holds other tensors than the model trains, or its step is"
        " never called.",
        fix="Compare the optimizer's parameters with the model's after every replacement or move"
        " of modules; check requires_grad; `surefoot audit` names the line.",
        source="https://docs.pytorch.org/docs/stable/optim.html (construct the optimizer after the"
        " model is moved or changed)",
        needs=("loss",),
        explains=(
            "labels-unrelated",
            "rate-too-low",
            "underfitting",
            "vanishing-gradients",
            "rate-too-high",
        ),
    )

    def look(self, signals: Signals) -> Verdict | None:
        recording = signals.recording
        if not signals.has_shape or signals.broke_at is not None:
            return None
        signs = []
        evidence: dict[str, object] = {"first_loss": signals.initial, "last_loss": signals.loss.end}
        norms = recording["weight_norm"].finite.values
        if len(norms) >= 3 and (norms != norms[0]).any():
            return None
        if len(norms) >= 3:
            signs.append(f"the weight norm is {norms[0]:.6g} in all {len(norms)} rows")
            evidence["weight_norm"] = float(norms[0])
        validation = signals.validation.values
        still = signals.is_flat_but_for_noise
        if still and len(validation) >= 3 and not (validation != validation[0]).any():
            signs.append(
                f"the validation loss is {validation[0]:.6g} in all {len(validation)} of its"
            )
            signs[-1] += " evaluations"
            evidence["validation_loss"] = float(validation[0])
        gradient = signals.gradient.values
        if len(gradient) >= SHORTEST:
            zeros = float((gradient == 0.0).mean())
            evidence["share_of_zero_gradients"] = zeros
            if zeros > 0.95:
                signs.append(f"the gradient norm is exactly 0 in {zeros:.0%} of the updates")
        if not signs or signals.gradient_is_tiny or signals.rate_is_nothing:
            return None
        return Verdict(
            f"The weights do not move: {'; '.join(signs)}.",
            weight=0.97,
            evidence=evidence,
        )
