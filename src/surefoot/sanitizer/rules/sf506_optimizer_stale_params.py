"""SF506: the optimizer holds the parameters of a model that is not trained any more."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable

from surefoot.core.finding import Certainty, Finding
from surefoot.sanitizer import events as ev
from surefoot.sanitizer.rules.base import Rule, RuleInfo
from surefoot.sanitizer.trace import Trace

LEAST = 2
SAME = 0.8


class OptimizerStaleParams(Rule):
    """Tensors that no longer occur in any graph, while same-shaped leaves are not held."""

    info = RuleInfo(
        code="SF506",
        slug="optimizer-stale-params",
        certainty=Certainty.PROOF,
        title="The optimizer steps parameters of another model object than the one in use.",
        observes="An optimizer none of whose parameters occur in the graph of the loss, while the"
        " graph has leaves of the same shapes that no optimizer holds. Quiet for staged training.",
        why="The model in use is not trained at all; the optimizer moves tensors that nobody"
        " reads.",
        example="optimizer = Adam(model.parameters())\nmodel = copy.deepcopy(best_model)",
        fix="Load the weights into the old object (load_state_dict), or make the optimizer anew.",
        source="Follows from what an optimizer holds.",
    )

    def __init__(self, trace: Trace) -> None:
        super().__init__(trace)
        self.stale: dict[int, list[int]] = defaultdict(list)
        self.steps_before: dict[int, int] = {}
        self.stepped: dict[int, int] = {}

    def on_backward_begin(self, event: ev.BackwardBegin) -> None:
        if not event.walk or "step" in self.trace.causes:
            return
        held = [self.trace.parameters.find(leaf) for leaf in event.leaves]
        reached = {state.key for state in held if state is not None}
        shapes = Counter(
            tuple(leaf.shape)
            for leaf, state in zip(event.leaves, held, strict=True)
            if state is None
        )
        for optimizer in self.trace.optimizers:
            if optimizer.ref() is None or not shapes:
                continue
            if any(state.key in reached for state in optimizer.parameters):
                self.stale.pop(optimizer.key, None)
                continue
            if any(state.unknown for state in optimizer.parameters):
                # Its gradients are put there by hand: master weights.
                continue
            mine = Counter(state.shape for state in optimizer.parameters)
            common = (mine & shapes).total()
            if common >= SAME * mine.total() and mine.total() >= 2:
                self.steps_before.setdefault(optimizer.key, optimizer.steps)
                if len(self.stale[optimizer.key]) < 1000:
                    self.stale[optimizer.key].append(optimizer.steps)

    def findings(self) -> Iterable[Finding]:
        for optimizer in self.trace.optimizers:
            looks = self.stale.get(optimizer.key, [])
            since = optimizer.steps - looks[0] if looks else 0
            if len(looks) < LEAST or since < LEAST:
                continue
            yield self.report(
                f"{since} steps of {optimizer} moved parameters that are in no graph any more,"
                f" while the loss depends on {len(optimizer.parameters)} tensors of the same"
                " shapes that no optimizer holds.",
                optimizer.site,
                evidence={"steps": since, "parameters": len(optimizer.parameters)},
            )
