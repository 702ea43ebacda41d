"""SF204: the short window of an epoch leaks into the next one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from surefoot.core.finding import Certainty, Finding
from surefoot.sanitizer import events as ev
from surefoot.sanitizer.rules.base import Rule, RuleInfo, Tally
from surefoot.sanitizer.rules.windows import WindowTally
from surefoot.sanitizer.trace import Trace


class AccumTailLeak(Rule):
    """A window spans an epoch boundary and has more B than the others."""

    info = RuleInfo(
        code="SF204",
        slug="accum-tail-leak",
        certainty=Certainty.STRONG,
        title="Gradients left over at the end of an epoch are added to the first update of the"
        " next.",
        observes="A window that spans two passes over one DataLoader and has more backward passes"
        " than the usual one. Quiet where the window keeps its size across the border.",
        why="The first update of every epoch is larger than all others and mixes old with new"
        " gradients.",
        example="for i, batch in enumerate(loader):  # 10 batches, windows of 4\n"
        "    (loss(batch) / 4).backward()\n"
        "    if (i + 1) % 4 == 0: optimizer.step(); optimizer.zero_grad()",
        fix="Step at the end of the epoch, or count micro-batches across epochs.",
        source="Follows from autograd's accumulation into .grad.",
    )

    def __init__(self, trace: Trace) -> None:
        super().__init__(trace)
        self.windows: dict[int, WindowTally] = defaultdict(WindowTally)
        self.leaks: dict[int, Tally] = defaultdict(Tally)
        self.sizes: dict[int, int] = {}

    def on_step_end(self, event: ev.StepEnd) -> None:
        key = event.optimizer.key
        records = event.update.backwards
        if not self.windows[key].add(event.update):
            return
        loaders = {record.loader for record in records}
        epochs = {record.epoch for record in records}
        usual = self.windows[key].usual
        if len(loaders) == 1 and 0 not in loaders and len(epochs) > 1 and len(records) > usual > 0:
            self.leaks[key].add(event.site)
            self.sizes[key] = len(records)

    def findings(self) -> Iterable[Finding]:
        for optimizer in self.trace.optimizers:
            tally = self.leaks.get(optimizer.key)
            if tally is None:
                continue
            usual = self.windows[optimizer.key].usual
            yield self.report(
                f"{tally.count} updates at the start of an epoch were made of"
                f" {self.sizes[optimizer.key]} instead of {usual} micro-batches: the rest of the"
                " epoch before was still in the gradients.",
                tally.site,
                evidence={
                    "leaks": tally.count,
                    "usual_window": usual,
                    "window": self.sizes[optimizer.key],
                },
            )
