"""SF702: the host waits for the device in every step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from surefoot.core.finding import Certainty, Finding
from surefoot.sanitizer import events as ev
from surefoot.sanitizer.frames import Site
from surefoot.sanitizer.rules.base import Rule, RuleInfo, share
from surefoot.sanitizer.trace import Trace

LEAST_UPDATES = 20
SHARE = 0.9


class SyncEveryStep(Rule):
    """`.item()` and the like on device tensors, from the user's lines, in nearly every step."""

    info = RuleInfo(
        code="SF702",
        slug="sync-every-step",
        certainty=Certainty.HEURISTIC,
        title="A value is read from the device in every update.",
        observes="item(), tolist(), cpu(), numpy(), float(), int() and bool() of device tensors"
        " called by the user's own lines in nearly every update. Quiet on a CPU and inside"
        " libraries.",
        why="The host waits until the device has done everything queued before it; the device then"
        " idles while the next step is prepared.",
        example="running += loss.item()",
        fix="Sum on the device and read every so many updates.",
        source="https://pytorch.org/tutorials/recipes/recipes/tuning_guide.html",
    )

    def __init__(self, trace: Trace) -> None:
        super().__init__(trace)
        self.calls: Counter[tuple[Site, str]] = Counter()
        self.last: dict[tuple[Site, str], int] = {}

    def on_synchronised(self, event: ev.Synchronised) -> None:
        key = event.site, event.how
        is_new = self.trace.training_began and self.last.get(key) != self.trace.updates
        if is_new and (len(self.calls) < 1000 or key in self.calls):
            self.calls[key] += 1
            self.last[key] = self.trace.updates

    def findings(self) -> Iterable[Finding]:
        updates = self.trace.updates
        for (site, how), count in self.calls.items():
            if updates >= LEAST_UPDATES and count >= SHARE * (updates - 1):
                yield self.report(
                    f"{how} made the host wait for the device in {share(count, updates)} updates.",
                    site,
                    evidence={"updates": updates, "waits": count},
                )
