"""SF608: prediction and target are broadcast against each other."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

from surefoot.sanitizer import events as ev
from surefoot.sanitizer import graph
from surefoot.sanitizer.rules.base import Findings, Rule, Site

ELEMENTWISE = ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss")
EXPLICIT = ("Unsqueeze", "View", "ReshapeAlias", "Expand", "T", "Transpose", "Permute")
Shape = tuple[int, ...]


class LossBroadcast(Rule, page=__file__):
    """Elementwise op between (N, 1) and (N) feeding a reduction that becomes the loss."""

    def setup(self) -> None:
        self.calls: Counter[tuple[Site, Shape, Shape]] = Counter()
        self.graphs: Counter[tuple[Site, Shape, Shape]] = Counter()

    def on_loss_called(self, event: ev.LossCalled) -> None:
        if event.name not in ELEMENTWISE or not event.grad_enabled:
            return
        one, two = tuple(event.input.shape), tuple(event.target.shape)
        if len(self.calls) < 1000 and _is_broadcast(one, two):
            self.calls[event.site, one, two] += 1

    def on_backward_begin(self, event: ev.BackwardBegin) -> None:
        if not event.walk or not event.roots or event.roots[0].numel() != 1:
            return
        for node in graph.nodes(event.roots[0].grad_fn, 2_000):
            if graph.kind(node) in ("Sub", "Rsub"):
                shapes = _broadcast(node)
                if shapes and len(self.graphs) < 1000:
                    self.graphs[event.site, *shapes] += 1

    def findings(self) -> Findings:
        for (site, one, two), count in self.calls.items():
            message = (
                f"{count} calls of this loss compared shapes {one} and {two}: they broadcast to"
                f" ({one[0]}, {one[0]})."
            )
            yield self.report(message, site, calls=count, input=list(one), target=list(two))
        if self.calls:
            return
        for (site, operand, result), count in self.graphs.items():
            message = (
                f"What is backpropagated here holds a difference of shape {result} with an operand"
                f" of shape {operand}: prediction and target were broadcast against each other."
            )
            yield self.report(message, site, seen=count, operand=list(operand), result=list(result))
            return


def _is_broadcast(one: Shape, two: Shape) -> bool:
    """Whether N numbers meet a column of N, or either of them a square that was made so before."""
    small, large = sorted((one, two), key=lambda shape: (math.prod(shape), len(shape)))
    size = small[0] if small else 0
    if size < 2 or small not in ((size,), (size, 1)) or small == large:
        return False
    return large in ((size, 1), (size, size))


def _broadcast(node: Any) -> tuple[Shape, Shape] | None:
    result = graph.output_shape(node)
    if result is None or len(result) != 2 or result[0] != result[1] or result[0] < 2:
        return None
    size = result[0]
    operands = [(parent, index) for parent, index in node.next_functions if parent is not None]
    shapes = [graph.output_shape(parent, index) for parent, index in operands]
    if not shapes or any(shape not in ((size,), (size, 1)) for shape in shapes):
        return None
    if len(shapes) == 2 and shapes[0] == shapes[1]:
        return None
    for (parent, _), shape in zip(operands, shapes, strict=True):
        # Who reshapes to (N, 1) means it.
        if shape == (size, 1) and graph.kind(parent) in EXPLICIT:
            return None
    assert shapes[0] is not None
    return shapes[0], result
