"""SF201: gradients are cleared between the micro-batches of a window."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from surefoot.core.finding import Certainty, Finding
from surefoot.sanitizer import events as ev
from surefoot.sanitizer.frames import Site
from surefoot.sanitizer.rules.base import Rule, RuleInfo, Tally, share
from surefoot.sanitizer.rules.windows import is_homogeneous
from surefoot.sanitizer.trace import Trace

LEAST = 3


class AccumWiped(Rule):
    """k B per S, but a Z after every B."""

    info = RuleInfo(
        code="SF201",
        slug="accum-wiped",
        certainty=Certainty.STRONG,
        title="Gradients are cleared on every micro-batch, so a window keeps only its last one.",
        observes="Several equal backward passes per update with unused gradients cleared between"
        " each. Quiet where the passes are of different losses, and where the gradients that are"
        " stepped were put there by hand (each sample's was clipped, projected or kept first).",
        why="All but the last micro-batch of each window are computed for nothing.",
        example="optimizer.zero_grad()\n(loss / 4).backward()\n"
        "if (i + 1) % 4 == 0: optimizer.step()",
        fix="Clear the gradients once per update: after step().",
        source="Follows from what zero_grad() does.",
    )

    def __init__(self, trace: Trace) -> None:
        super().__init__(trace)
        self.tallies: dict[int, Tally] = defaultdict(Tally)
        self.sizes: dict[int, int] = {}
        self.wipes: dict[int, Site] = {}

    def on_step_begin(self, event: ev.StepBegin) -> None:
        optimizer = event.optimizer
        size = len(optimizer.window)
        # The wipe after the last micro-batch, if any, is another rule's.
        if event.closure or size < 2 or optimizer.wipes < size - 1:
            return
        if any(state.unknown for state in optimizer.parameters):
            return
        if is_homogeneous(optimizer.window):
            self.tallies[optimizer.key].add(optimizer.wipe_site)
            self.sizes[optimizer.key] = size

    def findings(self) -> Iterable[Finding]:
        for optimizer in self.trace.optimizers:
            tally = self.tallies.get(optimizer.key)
            if tally is None or tally.count < min(LEAST, optimizer.steps):
                continue
            if tally.count < 0.5 * optimizer.steps:
                continue
            size = self.sizes[optimizer.key]
            yield self.report(
                f"Each update follows {size} backward passes, but the gradients are cleared here"
                f" between them, in {share(tally.count, optimizer.steps)} updates:"
                f" {size - 1} of {size} micro-batches are lost.",
                tally.site,
                evidence={"updates": optimizer.steps, "wiped": tally.count, "window": size},
            )
