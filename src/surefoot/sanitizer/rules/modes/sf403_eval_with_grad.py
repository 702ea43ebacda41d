"""SF403: evaluation builds graphs that nobody uses."""

from __future__ import annotations

import weakref
from collections import Counter, defaultdict

from surefoot.sanitizer import events as ev
from surefoot.sanitizer import graph
from surefoot.sanitizer.matchers.copies import WeightCopies, gives_targets
from surefoot.sanitizer.rules.base import Findings, Rule, RuleInfo, Site, share

LEAST = 2
MOST_INTERVALS = 10_000
NOTE = "surefoot-eval-graph"


class _Note:
    """Lives as long as the graph node whose metadata holds it."""

    __slots__ = ("__weakref__", "used")

    def __init__(self) -> None:
        self.used = [False]
        """Whether the node was backpropagated: a cell that outlives the note."""


class EvalWithGrad(Rule):
    """Eval-mode forward with grad enabled whose graph is freed without any B."""

    info = RuleInfo.beside(__file__)

    def setup(self) -> None:
        self.all: Counter[tuple[Site, str]] = Counter()
        self.unused: Counter[tuple[Site, str]] = Counter()
        self.copies = self.use(WeightCopies)
        self.intervals: dict[tuple[Site, str], set[int]] = defaultdict(set)
        """Numbers of updates after which a copy of the trained model was called."""
        self.completed = False
        self.open: dict[int, tuple[weakref.ref[_Note], tuple[Site, str]]] = {}

    def on_forward_end(self, event: ev.ForwardEnd) -> None:
        if not event.grad_enabled or event.training or event.input_grad:
            return
        output = next((t for t in graph.tensors_in(event.output) if t.grad_fn is not None), None)
        if output is None or output.grad_fn is None or len(self.all) > 1000:
            return
        key = event.site, type(event.module).__name__
        if not self.trace.is_trained(event.module):
            if not self.copies.follows(event.module):
                return
            if len(self.intervals[key]) < MOST_INTERVALS:
                self.intervals[key].add(self.trace.updates)
        note, number = _Note(), event.seq
        used = note.used
        self.all[key] += 1

        def backpropagated(grads: object) -> None:
            used[0] = True

        def freed(_: object) -> None:
            self.open.pop(number, None)
            if not used[0]:
                self.unused[key] += 1

        graph.notes_of(output.grad_fn)[NOTE] = note
        output.grad_fn.register_prehook(backpropagated)
        self.open[number] = weakref.ref(note, freed), key

    def on_run_ended(self, event: ev.RunEnded) -> None:
        self.completed = event.outcome == "completed"

    def findings(self) -> Findings:
        unused = self.unused.copy()
        # Graphs that are still there when the script is over are used by nobody any more.
        kept = [(note, key) for reference, key in self.open.values() if (note := reference())]
        unused.update(key for note, key in kept if self.completed and not note.used[0])
        for key, count in unused.items():
            if count < LEAST or count < 0.9 * self.all[key]:
                continue
            # A copy that is called in most updates gives them targets.
            if gives_targets(self.intervals.get(key, set()), self.trace.updates):
                continue
            site, name = key
            yield self.report(
                f"{share(count, self.all[key])} forwards of {name} in eval mode built a graph"
                " that was never backpropagated.",
                site,
                forwards=self.all[key],
                unused_graphs=count,
            )
