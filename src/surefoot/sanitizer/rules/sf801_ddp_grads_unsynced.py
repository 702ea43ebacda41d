"""SF801: ranks step with different gradients."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from surefoot.core.finding import Certainty, Finding
from surefoot.sanitizer import events as ev
from surefoot.sanitizer.frames import Site
from surefoot.sanitizer.rules.base import Rule, RuleInfo, share
from surefoot.sanitizer.rules.checksums import LEAST_UPDATES, Checksums, differing, unsynced
from surefoot.sanitizer.trace import Trace


class DdpGradsUnsynced(Rule):
    """Gradient checksums differ across ranks at S."""

    info = RuleInfo(
        code="SF801",
        slug="ddp-grads-unsynced",
        certainty=Certainty.PROOF,
        title="Ranks step with gradients that were not averaged.",
        observes="Digests of the gradients at sampled updates, compared across ranks that wrap"
        " a model"
        " in DistributedDataParallel or reduce gradients by hand. Quiet for sharded parameters and"
        " for ranks that keep gradients to themselves on purpose.",
        why="Each rank trains its own model on its own data; what is saved is the model of rank 0,"
        " trained on a part of the data.",
        example="loss = compute(model.module(x))  # around DistributedDataParallel",
        fix="Call the wrapped model, model(x), not model.module(x), in training.",
        source="torch.nn.parallel.DistributedDataParallel",
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
        if unsynced(facts):
            return
        for key, (apart, seen) in differing(facts, "gradients").items():
            if apart >= LEAST_UPDATES and apart >= 0.5 * seen:
                place = Site(*next(iter(facts.values()))["places"][key])
                yield cls.report(
                    f"At {share(apart, seen)} sampled updates the gradients of ranks"
                    f" {', '.join(map(str, sorted(facts)))} differ when the optimizer steps.",
                    place,
                    evidence={"sampled": seen, "different": apart, "ranks": sorted(facts)},
                )
