"""SF504: a parameter gets gradients that no optimizer uses."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from surefoot.core.finding import Certainty, Finding
from surefoot.sanitizer import events as ev
from surefoot.sanitizer.rules.base import Rule, RuleInfo
from surefoot.sanitizer.rules.coverage import Leaf, Leaves, listed
from surefoot.sanitizer.trace import Trace

LEAST_IN_VAIN = 3
SHARE_IN_VAIN = 0.3


class ParamNotInOptimizer(Rule):
    """Leaf with requires_grad that no stepping optimizer, nor in-place update, ever changes."""

    info = RuleInfo(
        code="SF504",
        slug="param-not-in-optimizer",
        certainty=Certainty.PROOF,
        title="Parameters of the trained model are in no optimizer.",
        observes="Leaves of the loss's graph that no optimizer holds and nothing else changes, and"
        " that belong to a model part of which is trained, or whose backward passes reach no"
        " weight of any optimizer. Quiet for master-weight copies, averaged"
        " and hand-updated weights, and fixed networks that gradients pass through.",
        why="They keep their initial values: gradients are computed for them and thrown away.",
        example="AdamW([p for m in model.modules() if not list(m.children())"
        " for p in m.parameters()])",
        fix="Add them to a group of the optimizer, or set requires_grad_(False) if they are meant"
        " to stay.",
        source="Follows from what an optimizer holds.",
    )

    def __init__(self, trace: Trace) -> None:
        super().__init__(trace)
        self.leaves = Leaves(trace)
        self.partly: set[int] = set()
        self.walks = 0

    def on_backward_begin(self, event: ev.BackwardBegin) -> None:
        if not event.walk:
            return
        self.walks += 1
        self.leaves.see(list(event.leaves), event.site)
        feeds_nothing = bool(event.leaves) and all(
            isinstance(leaf, torch.nn.Parameter) and self.trace.parameters.find(leaf) is None
            for leaf in event.leaves
        )
        for leaf in event.leaves:
            if id(leaf) in self.partly:
                self.leaves.mark(leaf)
            elif feeds_nothing:
                self.leaves.count_in_vain(leaf)

    def on_step_end(self, event: ev.StepEnd) -> None:
        if event.optimizer.steps > 1:
            return
        # Which models are trained at all: their other parameters are missing, not fixed.
        for root in self.trace.roots:
            module = root()
            if module is not None and self.trace.is_trained(module):
                for parameter in module.parameters():
                    if len(self.partly) < 1_000_000:
                        self.partly.add(id(parameter))

    def findings(self) -> Iterable[Finding]:
        forgotten: list[Leaf] = [f for f in self.leaves.forgotten() if f.kind]
        marked = [leaf for leaf in forgotten if leaf.marked]
        if marked:
            yield self._finding(marked, Certainty.PROOF, "")
        # A rare backward pass through other weights measures something (Fisher information).
        least = max(LEAST_IN_VAIN, SHARE_IN_VAIN * self.walks)
        in_vain = [leaf for leaf in forgotten if not leaf.marked and leaf.in_vain >= least]
        if in_vain and any(optimizer.steps for optimizer in self.trace.optimizers):
            yield self._finding(in_vain, Certainty.STRONG, "; such a backward pass feeds nothing")

    def _finding(self, forgotten: list[Leaf], certainty: Certainty, also: str) -> Finding:
        names = [leaf.name for leaf in forgotten]
        stepping = [o for o in self.trace.optimizers if o.steps]
        site = stepping[-1].site if stepping else forgotten[0].site
        numel = sum(leaf.numel for leaf in forgotten)
        return self.report(
            f"{len(names)} parameters ({numel:,} values) take part in the loss but are in no"
            f" optimizer, and nothing changed them{also}: {listed(names)}.",
            site,
            certainty=certainty,
            evidence={
                "parameters": names[:50],
                "values": numel,
                "updates_watched": max(leaf.last_update for leaf in forgotten),
            },
        )
