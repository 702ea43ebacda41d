"""SF403: evaluation builds graphs that nobody uses."""

from __future__ import annotations

import weakref
from collections import Counter, defaultdict

from surefoot.sanitizer import events as ev
from surefoot.sanitizer import graph
from surefoot.sanitizer.matchers.copies import WeightCopies, gives_targets
from surefoot.sanitizer.rules.base import Findings, Rule, Site, share
from surefoot.sanitizer.rules.modes.active_calls import MOST_INTERVALS

LEAST = 2
SHARE = 0.9
MOST_PLACES = 1000
NOTE = "surefoot-eval-graph"
Place = tuple[Site, str]
"""A line, and the name of the module that it calls."""


class _GraphNote:
    """Lives as long as the graph node whose metadata holds it."""

    __slots__ = ("__weakref__", "used")

    def __init__(self) -> None:
        self.used = [False]
        """Whether the node was backpropagated: a cell that outlives the note."""


class EvalWithGrad(Rule, page=__file__):
    """A forward in eval mode with gradients enabled whose graph is freed without a backward()."""

    def setup(self) -> None:
        self.all: Counter[Place] = Counter()
        self.unused: Counter[Place] = Counter()
        self.copies = self.use(WeightCopies)
        self.intervals: dict[Place, set[int]] = defaultdict(set)
        """Numbers of updates after which a copy of the trained model was called."""
        self.open: dict[int, tuple[weakref.ref[_GraphNote], Place]] = {}

    def on_forward_end(self, event: ev.ForwardEnd) -> None:
        if not event.grad_enabled or event.training or event.input_grad:
            return
        node = graph.first_node(event.output)
        if node is None or len(self.all) > MOST_PLACES:
            return
        key = event.site, type(event.module).__name__
        if not self.trace.is_trained(event.module):
            if not self.copies.follows(event.module):
                return
            if len(self.intervals[key]) < MOST_INTERVALS:
                self.intervals[key].add(self.trace.updates)
        self.all[key] += 1
        self._follow(node, event.seq, key)

    def _follow(self, node: graph.Node, number: int, key: Place) -> None:
        """Counts a graph as unused where it is freed before anybody backpropagates it."""
        note = _GraphNote()
        used = note.used

        def backpropagated(grads: object) -> None:
            used[0] = True

        def freed(_: object) -> None:
            self.open.pop(number, None)
            if not used[0]:
                self.unused[key] += 1

        graph.notes_of(node)[NOTE] = note
        node.register_prehook(backpropagated)
        self.open[number] = weakref.ref(note, freed), key

    def findings(self) -> Findings:
        unused = self.unused.copy()
        if self.trace.completed:
            # Graphs that are still there when the script is over are used by nobody any more.
            kept = [(note, key) for reference, key in self.open.values() if (note := reference())]
            unused.update(key for note, key in kept if not note.used[0])
        for (site, name), count in unused.items():
            forwards = self.all[site, name]
            if count < max(LEAST, SHARE * forwards):
                continue
            # A copy that is called in most updates gives them targets.
            if not gives_targets(self.intervals.get((site, name), set()), self.trace.updates):
                message = (
                    f"{share(count, forwards)} forwards of {name} in eval mode built a graph that"
                    " was never backpropagated."
                )
                yield self.report(message, site, forwards=forwards, unused_graphs=count)
