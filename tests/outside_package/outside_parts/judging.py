"""A rule of the audit and a cause of the doctor."""

from __future__ import annotations

from surefoot.core.finding import Certainty, Severity
from surefoot.diagnosis.causes import CauseInfo, Sign, SignText, cause, sign
from surefoot.diagnosis.log_features.log import LogFeatures
from surefoot.diagnosis.needs import LOSS, RATE
from surefoot.sanitizer import events as ev
from surefoot.sanitizer.rules import Findings, Rule, RuleInfo, UpdateTally, share


class UnclippedUpdate(Rule):
    """An update that no clip came before."""

    info = RuleInfo(
        code="OUT01",
        slug="unclipped-update",
        certainty=Certainty.CONVENTION,
        title="Gradients are not clipped.",
        observes="Updates without a call of clip_grad_norm_ since the one before.",
        why="One bad batch can throw the weights far away.",
        fix="Call clip_grad_norm_ between backward() and step().",
    )

    def setup(self) -> None:
        self.is_clipped = False
        self.unclipped = UpdateTally(self.trace)

    def on_clip(self, event: ev.Clip) -> None:
        self.is_clipped = True

    def on_step_end(self, event: ev.StepEnd) -> None:
        if not self.is_clipped:
            self.unclipped.add(event.optimizer, event.site)
        self.is_clipped = False

    def findings(self) -> Findings:
        for optimizer, tally in self.unclipped.often(least=3, part=0.9):
            found = f"{share(tally.count, optimizer.steps)} updates of {optimizer} had no clip."
            yield self.report(found, tally.site, updates=optimizer.steps, unclipped=tally.count)


RATE_NEVER_CHANGES = CauseInfo(
    code="OUT02",
    slug="rate-never-changes",
    family="learning rate",
    severity=Severity.HINT,
    certainty=Certainty.CONVENTION,
    title="The learning rate is the same in all updates.",
    observes="The recorded rates.",
    why="Most losses fall further once the rate decays.",
    fix="Use a cosine schedule.",
    source="https://arxiv.org/abs/1608.03983",
    signs={"constant": SignText(0.3, "The rate is {rate:g} in all {num_rates} rows.")},
    explains=(),
)


@cause(RATE_NEVER_CHANGES, needs=(LOSS, RATE), min_losses=100, only_finite=True)
def rate_never_changes(log: LogFeatures) -> Sign | None:
    """The learning rate is the same in all updates."""
    rates = log.rate.values
    if (rates != rates[0]).any():
        return None
    return sign("constant", rate=float(rates[0]), num_rates=len(rates))
