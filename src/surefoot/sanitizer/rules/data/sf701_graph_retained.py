"""SF701: old graphs stay alive because a loss is kept."""

from __future__ import annotations

import itertools
import weakref

from torch import nn

from surefoot.sanitizer import events as ev
from surefoot.sanitizer import graph
from surefoot.sanitizer.rules.base import NOWHERE, Findings, Rule, Site

LEAST = 10
LEAST_PILE = 3
LEAST_PILES = 2
"""A sum of losses that starts anew at every epoch piles up again."""
OLD_UPDATES = 2
LOOKED_AT = 4
"""Parameters of a model that are looked at for a graph of their own."""
FACTORS = ("Mul", "Div", "Neg", *graph.VIEWS)
NOTE = "surefoot-root"


class _Note:
    """Lives as long as the graph node whose metadata holds it."""

    __slots__ = ("__weakref__",)


class GraphRetained(Rule, page=__file__):
    """Loss nodes older than some updates keep growing in number."""

    def setup(self) -> None:
        self.losses, self.outputs = _Living(), _Living()
        self.carried = 0
        self.carrier: tuple[str, Site] = "", NOWHERE

    def on_forward_begin(self, event: ev.ForwardBegin) -> None:
        for name, parameter in itertools.islice(event.module.named_parameters(), LOOKED_AT):
            # A tensor that is no parameter is there for one call (functional_call).
            if parameter.grad_fn is None or not isinstance(parameter, nn.Parameter):
                continue
            depth = sum(1 for _ in graph.nodes(parameter.grad_fn, 100 * LEAST))
            if depth > self.carried:
                self.carried, self.carrier = depth, (name, event.site)

    def on_forward_end(self, event: ev.ForwardEnd) -> None:
        node = graph.first_node(event.output) if event.grad_enabled else None
        if node is not None:
            self.outputs.add(node, event, self.trace.updates)

    def on_backward_begin(self, event: ev.BackwardBegin) -> None:
        if event.roots and event.roots[0].grad_fn is not None and event.roots[0].numel() == 1:
            self.losses.add(_loss_node(event.roots[0].grad_fn), event, self.trace.updates)

    def findings(self) -> Findings:
        if self.carried >= 2 * LEAST:
            name, site = self.carrier
            message = (
                f"The parameter {name} carries a graph of {self.carried} operations: it was changed"
                " in place from trained weights with gradients enabled."
            )
            yield self.report(
                message,
                site,
                operations=self.carried,
                parameter=name,
                fix="Update copies of the weights under torch.no_grad().",
            )
        for living, what in ((self.losses, "losses"), (self.outputs, "outputs of the model")):
            if living.most >= LEAST or living.piles >= LEAST_PILES:
                message = (
                    f"Up to {living.most} {what} of earlier updates still had their whole graph in"
                    " memory: something keeps the tensor itself."
                )
                yield self.report(
                    message,
                    living.site,
                    living_graphs=living.most,
                    times_piled_up=living.piles,
                    updates=self.trace.updates,
                )
                return


class _Living:
    """Graph nodes of one kind that are still there, the oldest first."""

    def __init__(self) -> None:
        self.alive: dict[int, tuple[weakref.ref[_Note], int]] = {}
        self.most = 0
        self.before = self.run = self.piles = 0
        self.looked_at = -1
        self.site: Site = NOWHERE

    def add(self, node: graph.Node, event: ev.TraceEvent, updates: int) -> None:
        """Takes in a new one, and counts those of earlier updates."""
        note, number = _Note(), event.seq

        def freed(_: object) -> None:
            self.alive.pop(number, None)

        graph.notes_of(node)[id(self)] = note
        self.alive[number] = weakref.ref(note, freed), updates
        old = 0
        for _, update in self.alive.values():
            if update + OLD_UPDATES > updates:
                break
            old += 1
        self._count_runs(old, updates)
        if old > self.most:
            self.most, self.site = old, event.site

    def _count_runs(self, old: int, updates: int) -> None:
        """Counts how often old ones pile up one by one and are let go together."""
        if updates == self.looked_at:
            return
        grew = old == self.before + 1 and updates == self.looked_at + 1
        self.run = self.run + 1 if grew else 0
        self.piles += self.run == LEAST_PILE
        self.before, self.looked_at = old, updates


def _loss_node(node: graph.Node) -> graph.Node:
    """The node behind constant factors: whoever keeps the loss before or after them keeps it."""
    for _ in range(8):
        following = [n for n, _ in node.next_functions if n is not None]
        if graph.kind(node) not in FACTORS or len(following) != 1:
            return node
        if not following[0].next_functions:
            return node
        node = following[0]
    return node
