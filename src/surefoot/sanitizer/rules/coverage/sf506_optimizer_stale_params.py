"""SF506: the optimizer holds the parameters of a model that is not trained any more."""

from __future__ import annotations

from collections import Counter, defaultdict

from surefoot.sanitizer import events as ev
from surefoot.sanitizer.matchers.leaves import listed
from surefoot.sanitizer.rules.base import Finding, Findings, Rule
from surefoot.sanitizer.rules.coverage.replaced import Replaced, Replacements
from surefoot.sanitizer.state import OptimizerState

LEAST = 2
SAME = 0.8


class OptimizerStaleParams(Rule, page=__file__):
    """Tensors that no longer occur in any graph, while same-shaped leaves are not held."""

    def setup(self) -> None:
        self.stale: dict[int, list[int]] = defaultdict(list)
        self.replaced = self.use(Replacements)

    def on_backward_begin(self, event: ev.BackwardBegin) -> None:
        if not event.walk or "step" in self.trace.causes:
            return
        held = [self.trace.parameters.find(leaf) for leaf in event.leaves]
        reached = {state.key for state in held if state is not None}
        strangers = [leaf for leaf, s in zip(event.leaves, held, strict=True) if s is None]
        shapes = Counter(tuple(leaf.shape) for leaf in strangers)
        for optimizer in self.trace.optimizers:
            if optimizer.ref() is None or not shapes:
                continue
            if any(state.key in reached for state in optimizer.parameters):
                self.stale.pop(optimizer.key, None)
                self.replaced.look(optimizer, reached, strangers)
                continue
            if any(state.unknown for state in optimizer.parameters):
                # Its gradients are put there by hand: master weights.
                continue
            mine = Counter(state.shape for state in optimizer.parameters)
            common = (mine & shapes).total()
            stale = self.stale[optimizer.key]
            if common >= SAME * mine.total() and mine.total() >= 2 and len(stale) < 1000:
                stale.append(optimizer.steps)

    def findings(self) -> Findings:
        for optimizer in self.trace.optimizers:
            found = self.replaced.seen.get(optimizer.key)
            if found is not None and found.looks >= LEAST:
                steps = optimizer.steps - found.first
                if steps >= LEAST:
                    yield self._of_replaced(optimizer, found, steps)
            looks = self.stale.get(optimizer.key, [])
            since = optimizer.steps - looks[0] if looks else 0
            if len(looks) < LEAST or since < LEAST:
                continue
            message = (
                f"{since} steps of {optimizer} moved parameters that are in no graph any more,"
                f" while the loss depends on {len(optimizer.parameters)} tensors of the same"
                " shapes that no optimizer holds."
            )
            yield self.report(
                message, optimizer.site, steps=since, parameters=len(optimizer.parameters)
            )

    def _of_replaced(self, optimizer: OptimizerState, found: Replaced, steps: int) -> Finding:
        message = (
            f"{optimizer} holds {found.old} parameters that no model has any more; those that took"
            f" their place are in no optimizer and stayed as they were over {steps} steps:"
            f" {listed(found.names)}."
        )
        return self.report(
            message,
            optimizer.site,
            steps=steps,
            gone=found.old,
            in_use=found.names[:20],
            fix="Add the new parameters with optimizer.add_param_group, or make the optimizer anew"
            " after the model was changed.",
        )
