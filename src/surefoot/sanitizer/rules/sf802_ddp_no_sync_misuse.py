"""SF802: gradients are never reduced, because every forward ran under no_sync."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from surefoot.core.finding import Certainty, Finding
from surefoot.sanitizer import events as ev
from surefoot.sanitizer.frames import Site
from surefoot.sanitizer.rules.base import Rule, RuleInfo, share
from surefoot.sanitizer.rules.checksums import LEAST_UPDATES, Checksums, differing, unsynced
from surefoot.sanitizer.trace import Trace


class DdpNoSyncMisuse(Rule):
    """All wrapped forwards ran with synchronisation off, and gradients differ at S."""

    info = RuleInfo(
        code="SF802",
        slug="ddp-no-sync-misuse",
        certainty=Certainty.PROOF,
        title="no_sync() covers every forward, so gradients are never averaged.",
        observes="Forwards of DistributedDataParallel with gradient synchronisation off, for nearly"
        " all of them, and gradients that differ across ranks when the optimizer steps. Quiet"
        " where the"
        " last forward of each window is outside.",
        why="Whether a backward pass reduces is decided in the forward pass: leaving no_sync()"
        " before backward() is too late. Ranks drift apart.",
        example="with model.no_sync():\n    loss = f(model(x))\nloss.backward()",
        fix="Run both forward and backward of the last micro-batch of a window outside no_sync().",
        source="torch.nn.parallel.DistributedDataParallel.no_sync",
    )

    def __init__(self, trace: Trace) -> None:
        super().__init__(trace)
        self.sums = Checksums(trace)

    def on_parallel_wrapped(self, event: ev.ParallelWrapped) -> None:
        self.sums.wrapped()

    def on_collective(self, event: ev.Collective) -> None:
        self.sums.collective(event)

    def on_forward_end(self, event: ev.ForwardEnd) -> None:
        self.sums.forward(event)

    def on_step_begin(self, event: ev.StepBegin) -> None:
        self.sums.step_begin(event)

    def on_step_end(self, event: ev.StepEnd) -> None:
        self.sums.step_end(event)

    def facts(self) -> Any:
        return self.sums.facts()

    def findings(self) -> Iterable[Finding]:
        return ()

    @classmethod
    def across(cls, facts: Mapping[int, Any]) -> Iterable[Finding]:
        if not unsynced(facts):
            return
        for key, (apart, seen) in differing(facts, "gradients").items():
            if apart >= LEAST_UPDATES and apart >= 0.5 * seen:
                first = next(iter(facts.values()))
                yield cls.report(
                    f"{share(first['unsynced'], first['forwards'])} training forwards ran with"
                    " gradient synchronisation off, and the gradients of the ranks differ at"
                    f" {share(apart, seen)} sampled updates.",
                    Site(*first["places"][key]),
                    evidence={
                        "sampled": seen,
                        "different": apart,
                        "forwards": first["forwards"],
                        "without_sync": first["unsynced"],
                        "ranks": sorted(facts),
                    },
                )
