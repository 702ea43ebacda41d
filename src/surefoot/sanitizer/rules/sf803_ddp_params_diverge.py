"""SF803: ranks hold different weights."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from surefoot.core.finding import Certainty, Finding
from surefoot.sanitizer import events as ev
from surefoot.sanitizer.frames import Site
from surefoot.sanitizer.rules.base import Rule, RuleInfo, share
from surefoot.sanitizer.rules.checksums import LEAST_UPDATES, Checksums, differing
from surefoot.sanitizer.trace import Trace


class DdpParamsDiverge(Rule):
    """Parameter checksums differ across ranks although their gradients are equal."""

    info = RuleInfo(
        code="SF803",
        slug="ddp-params-diverge",
        certainty=Certainty.PROOF,
        title="Ranks hold different weights although they share gradients.",
        observes="Digests of weights and gradients at sampled updates, across ranks: weights that"
        " differ where gradients are equal. Quiet for sharded parameters.",
        why="The averaged gradient belongs to none of the models: each rank moves from another"
        " start, and only one of them is saved.",
        example="torch.manual_seed(rank)\nmodel = Net()  # and gradients averaged by all_reduce",
        fix="Broadcast the weights of rank 0 before training, or use DistributedDataParallel.",
        source="torch.nn.parallel.DistributedDataParallel (weights are broadcast at construction)",
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
        gradients = differing(facts, "gradients")
        for key, (apart, seen) in differing(facts, "weights").items():
            if gradients.get(key, (0, 0))[0]:
                continue  # the gradients are the cause, and another rule's
            if apart >= LEAST_UPDATES and apart >= 0.5 * seen:
                first = next(iter(facts.values()))
                yield cls.report(
                    f"After {share(apart, seen)} sampled updates the weights of ranks"
                    f" {', '.join(map(str, sorted(facts)))} differ, although their gradients are"
                    " equal: they did not start from the same weights.",
                    Site(*first["places"][key]),
                    evidence={"sampled": seen, "different": apart, "ranks": sorted(facts)},
                )
