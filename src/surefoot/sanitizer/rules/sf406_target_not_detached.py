"""SF406: gradients flow into a bootstrapped target."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from surefoot.core.finding import Certainty, Finding
from surefoot.sanitizer import events as ev
from surefoot.sanitizer import graph
from surefoot.sanitizer.rules.base import Rule, RuleInfo
from surefoot.sanitizer.rules.losscalls import Verdicts, look_now
from surefoot.sanitizer.trace import Trace

REGRESSION = ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss")


class TargetNotDetached(Rule):
    """Both operands of the regression loss depend on the same parameters."""

    info = RuleInfo(
        code="SF406",
        slug="target-not-detached",
        certainty=Certainty.HEURISTIC,
        title="A bootstrapped target is not detached.",
        observes="A regression loss, or a difference in the graph of the loss, one side of which"
        " has the form reward + factor × value and depends on the same parameters as the other."
        " Quiet for siamese and consistency losses.",
        why="The target is pulled towards the prediction: temporal-difference learning becomes"
        " another, slower and biased algorithm.",
        example="target = r + gamma * q(s2).max(1).values\nloss = F.mse_loss(q(s), target)",
        fix="Compute the target under torch.no_grad(), or detach() it.",
        source="Sutton, Barto, Reinforcement Learning, 2nd ed., section 11.5 (residual gradient)",
    )

    def __init__(self, trace: Trace) -> None:
        super().__init__(trace)
        self.calls = Verdicts()
        self.graphs = Verdicts()

    def on_loss_called(self, event: ev.LossCalled) -> None:
        if event.name in REGRESSION and event.grad_enabled and look_now(event.call):
            sides = event.input.grad_fn, event.target.grad_fn
            self.calls.add(event.site, _bootstraps(*sides))

    def on_backward_begin(self, event: ev.BackwardBegin) -> None:
        if not event.walk or not event.roots:
            return
        found = False
        for node in graph.nodes(event.roots[0].grad_fn, 500):
            if graph.kind(node) == "Sub" and len(node.next_functions) == 2:
                found = found or _bootstraps(*(parent for parent, _ in node.next_functions))
        self.graphs.add(event.site, found)

    def findings(self) -> Iterable[Finding]:
        for site, count in self.calls.always() or self.graphs.always():
            yield self.report(
                "Prediction and target of this loss depend on the same parameters, and the target"
                f" has the form reward + factor × value, in all {count} calls looked at.",
                site,
                evidence={"calls_looked_at": count},
            )


def _bootstraps(one: Any, two: Any) -> bool:
    if one is None or two is None:
        return False
    if not (_is_target(one) or _is_target(two)):
        return False
    return bool(graph.leaf_ids(one) & graph.leaf_ids(two))


def _is_target(node: Any) -> bool:
    """`r + gamma * ... value`: a sum with data, of a product with data."""
    node = graph.through_views(node)
    if node is None or graph.kind(node) != "Add":
        return False
    parents = [parent for parent, _ in node.next_functions]
    if sum(parent is not None for parent in parents) != 1:
        return False
    inner = graph.through_views(next(parent for parent in parents if parent is not None))
    if inner is None or graph.kind(inner) != "Mul":
        return False
    return sum(parent is not None for parent, _ in inner.next_functions) == 1
