"""SF406: gradients flow into a bootstrapped target."""

from __future__ import annotations

from typing import Any

from surefoot.sanitizer import events as ev
from surefoot.sanitizer import graph
from surefoot.sanitizer.rules.base import Findings, Looks, Rule, Site, look_now

LEAST_LOOKS = 3
REGRESSION = ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss")


class TargetNotDetached(Rule, page=__file__):
    """Both operands of the regression loss depend on the same parameters."""

    def setup(self) -> None:
        self.calls = Looks[Site]()
        self.graphs = Looks[Site]()

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

    def findings(self) -> Findings:
        found = [*self.calls.often(LEAST_LOOKS)] or self.graphs.often(LEAST_LOOKS)
        for site, count, _ in found:
            message = (
                "Prediction and target of this loss depend on the same parameters, and the target"
                f" has the form reward + factor × value, in all {count} calls looked at."
            )
            yield self.report(message, site, calls_looked_at=count)


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
