"""Observes backward passes and the graph they start from. Runs no node of its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from surefoot.sanitizer import events as ev
from surefoot.sanitizer import graph
from surefoot.sanitizer.frames import user_site
from surefoot.sanitizer.probe.patches import Patches
from surefoot.sanitizer.trace import Trace


def attach(patches: Patches) -> None:
    """Watches backward for as long as the patches are in place."""
    trace = patches.trace

    def backward(original: Any, tensors: Any, *args: Any, **kwargs: Any) -> None:
        if isinstance(tensors, Iterator):
            # It can be read once: torch and we read the same tuple.
            tensors = tuple(tensors)
        given = tensors if isinstance(tensors, list | tuple) else (tensors,)
        roots = [tensor for tensor in given if isinstance(tensor, torch.Tensor)]
        uses, terms, scaled = trace.safely(_before, trace, roots) or (1, (), False)
        trace.causes.append("backward")
        try:
            original(tensors, *args, **kwargs)
            trace.safely(_after, trace, uses, terms, scaled)
        finally:
            trace.causes.pop()

    def saved_hooks(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        graph.saved_hooks_seen = True
        return original(self, *args, **kwargs)

    graph.saved_hooks_seen = False
    patches.around(torch.autograd, "backward", backward, rebind=True)
    patches.around(torch.autograd.graph.saved_tensors_hooks, "__enter__", saved_hooks)


def _before(trace: Trace, roots: Sequence[torch.Tensor]) -> tuple[int, Any, bool]:
    trace.gradients.observe(trace.gradients.all_parameters())
    trace.settle_windows()
    walk = trace.walks.begin()
    uses = 1
    terms: tuple[graph.LossTerm, ...] = ()
    if roots and roots[0].grad_fn is not None:
        notes = graph.notes_of(roots[0].grad_fn)
        uses = notes.get(graph.MARK, 0) + 1
        notes[graph.MARK] = uses
        terms = graph.loss_terms(roots[0])
    trace.emit(
        ev.BackwardBegin(
            **trace.here(),
            roots=roots,
            walk=walk,
            leaves=_leaves(roots) if walk else (),
        )
    )
    return uses, terms, _is_scaled(trace, roots)


def _leaves(roots: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    found = {}
    for root in roots:
        for leaf in graph.leaves(root.grad_fn):
            found[id(leaf)] = leaf
    return list(found.values())


def _is_scaled(trace: Trace, roots: Sequence[torch.Tensor]) -> bool:
    node = roots[0].grad_fn if roots else None
    for _ in range(8):
        if node is None:
            return False
        key = graph.notes_of(node).get(graph.SCALE_MARK)
        if key is not None:
            # A scale of exactly 1 changes nothing.
            return not any(s.key == key and s.scale == 1.0 for s in trace.scalers)
        following = [n for n, _ in node.next_functions if n is not None]
        node = following[0] if len(following) == 1 else None
    return False


def _after(trace: Trace, uses: int, terms: Any, scaled: bool) -> None:
    trace.tick()
    changed = trace.gradients.observe(trace.gradients.all_parameters())
    for state in changed:
        state.scale_pending = scaled
    site = user_site(3)
    optimizers = trace.record_backward(site, changed, terms, uses)
    trace.emit(
        ev.BackwardEnd(
            seq=trace.seq,
            site=site,
            changed=changed,
            optimizers=optimizers,
            inside_step="step" in trace.causes,
            graph_uses=uses,
        )
    )
