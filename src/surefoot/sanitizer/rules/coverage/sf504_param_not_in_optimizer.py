"""SF504: a parameter gets gradients that no optimizer uses."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch

from surefoot.sanitizer import events as ev
from surefoot.sanitizer.matchers.leaves import Leaf, UnheldLeaves, listed
from surefoot.sanitizer.names import parameters_of
from surefoot.sanitizer.rules.base import Certainty, Finding, Findings, Rule
from surefoot.sanitizer.rules.coverage.intent import Intent, of_module

LAST_LOOK = 64
MOST_PARAMETERS = 1_000_000
LEAST_CLIPS = 3
LEAST_IN_VAIN = 3
SHARE_REACHED = 0.3
SHARE_IN_VAIN = 0.3


class ParamNotInOptimizer(Rule, page=__file__):
    """Leaf with requires_grad that no stepping optimizer, nor in-place update, ever changes."""

    def setup(self) -> None:
        self.leaves = self.use(UnheldLeaves)
        self.intent = self.use(Intent)
        self.partly: set[int] = set()
        self.root_of: dict[int, int] = {}
        """By identity of a parameter: key of the untrained model that it belongs to."""
        self.walks = 0
        self.vain: list[Leaf] = []
        """What the latest backward pass reached, if that was no weight of any optimizer."""

    def on_backward_begin(self, event: ev.BackwardBegin) -> None:
        self.vain = []
        if not event.walk:
            return
        self.walks += 1
        feeds_nothing = bool(event.leaves) and all(
            isinstance(leaf, torch.nn.Parameter) and self.trace.parameters.find(leaf) is None
            for leaf in event.leaves
        )
        self._look_for_new(event.leaves)
        for tensor in event.leaves:
            leaf = self.leaves.find(tensor)
            if leaf is None:
                continue
            leaf.root = self.root_of.get(id(tensor), leaf.root)
            if id(tensor) in self.partly:
                leaf.marked = True
            elif feeds_nothing:
                leaf.in_vain += 1
                self.vain.append(leaf)

    def on_clip(self, event: ev.Clip) -> None:
        for tensor in event.strangers:
            leaf = self.leaves.find(tensor)
            if leaf is not None and tensor.grad is not None:
                leaf.clipped += 1

    def on_step_begin(self, event: ev.StepBegin) -> None:
        for leaf in self.vain:
            leaf.steps_in_vain += 1
        self.vain = []

    def on_step_end(self, event: ev.StepEnd) -> None:
        steps = event.optimizer.steps
        if steps == 1:
            self._find_partly_trained()
        if steps <= LAST_LOOK and steps & (steps - 1) == 0:
            for key, module in self.intent.untrained():
                for parameter in of_module(module):
                    if len(self.root_of) < MOST_PARAMETERS:
                        self.root_of[id(parameter)] = key

    def _look_for_new(self, leaves: Sequence[torch.Tensor]) -> None:
        # A layer that joined a trained model is part of it.
        found = map(self.leaves.find, leaves)
        if self.partly and any(leaf is not None and leaf.seen == 1 for leaf in found):
            self.trace.names.learn()
            self._find_partly_trained()

    def _find_partly_trained(self) -> None:
        # Which models are trained at all: their other parameters are missing, not fixed.
        for module in self.trace.names.models():
            if self.trace.is_trained(module):
                for parameter in parameters_of(module):
                    if len(self.partly) < MOST_PARAMETERS:
                        self.partly.add(id(parameter))

    def findings(self) -> Findings:
        if not any(optimizer.steps for optimizer in self.trace.optimizers):
            return
        rest = [leaf for leaf in self.leaves.forgotten() if leaf.kind]
        found: dict[tuple[Certainty, str], list[Leaf]] = defaultdict(list)
        for leaf in rest:
            why = self._why(leaf)
            if why is not None:
                found[why].append(leaf)
        for (certainty, also), leaves in found.items():
            yield self._finding(leaves, certainty, also)

    def _why(self, leaf: Leaf) -> tuple[Certainty, str] | None:
        if leaf.marked:
            return Certainty.PROOF, ""
        # A rare backward pass through other weights measures something (Fisher information).
        since = max(1, self.walks - leaf.first_look)
        if leaf.in_vain >= max(LEAST_IN_VAIN, SHARE_IN_VAIN * self.walks) or (
            leaf.steps_in_vain >= max(LEAST_IN_VAIN, SHARE_IN_VAIN * since)
        ):
            return Certainty.STRONG, "; such a backward pass feeds nothing"
        if self.leaves.share_of_looks(leaf) < SHARE_REACHED:
            return None
        reason = self.intent.reason(leaf.root, leaf.clipped >= LEAST_CLIPS)
        return (Certainty.STRONG, f", although {reason}") if reason else None

    def _finding(self, forgotten: list[Leaf], certainty: Certainty, also: str) -> Finding:
        names = [leaf.name for leaf in forgotten]
        stepping = [o for o in self.trace.optimizers if o.steps]
        site = stepping[-1].site if stepping else forgotten[0].site
        numel = sum(leaf.numel for leaf in forgotten)
        message = (
            f"{len(names)} parameters ({numel:,} values) take part in the loss but are in no"
            f" optimizer, and nothing changed them{also}: {listed(names)}."
        )
        return self.report(
            message,
            site,
            certainty=certainty,
            parameters=names[:50],
            values=numel,
            updates_watched=max(leaf.last_update for leaf in forgotten),
        )
