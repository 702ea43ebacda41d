"""SF201: gradients are cleared between the micro-batches of a window."""

from __future__ import annotations

from surefoot.sanitizer import events as ev
from surefoot.sanitizer.matchers.leaves import some_values
from surefoot.sanitizer.matchers.windows import is_homogeneous
from surefoot.sanitizer.rules.base import Findings, Rule, UpdateTally

LEAST = 3
SHARE = 0.5


class AccumWiped(Rule, page=__file__):
    """Several backward passes per step(), and gradients are cleared after each."""

    def setup(self) -> None:
        self.wiped = UpdateTally(self.trace)
        self.marks: dict[int, tuple[float, ...]] = {}
        """By optimizer: some weights at the first backward pass of the open window."""
        self.moved: set[int] = set()
        """Optimizers whose weights changed between the backward passes of the open window."""

    def on_backward_end(self, event: ev.BackwardEnd) -> None:
        # Two passes at different weights are one update of its own kind (SAM), no micro-batches.
        for optimizer in event.optimizers:
            tensor = next((t for s in optimizer.parameters[:4] if (t := s.ref()) is not None), None)
            values = () if tensor is None else some_values(tensor)
            if len(optimizer.window) == 1:
                self.marks[optimizer.key] = values
                self.moved.discard(optimizer.key)
            elif self.marks.get(optimizer.key) != values:
                self.moved.add(optimizer.key)

    def on_step_begin(self, event: ev.StepBegin) -> None:
        optimizer = event.optimizer
        size = len(optimizer.window)
        # The wipe after the last micro-batch, if any, is another rule's.
        if event.closure or size < 2 or optimizer.wipes < size - 1:
            return
        by_hand = any(state.unknown for state in optimizer.parameters)
        by_hand = by_hand or optimizer.key in self.moved
        if not by_hand and is_homogeneous(optimizer.window):
            self.wiped.add(optimizer, optimizer.wipe_site, size)

    def findings(self) -> Findings:
        for optimizer, tally in self.wiped.often(LEAST, SHARE):
            size = tally.latest
            message = (
                f"Each update follows {size} backward passes, but the gradients are cleared here"
                f" between them, in {tally.of(optimizer.steps)} updates: {size - 1} of {size}"
                " micro-batches are lost."
            )
            yield self.report(
                message, tally.site, updates=optimizer.steps, wiped=tally.count, window=size
            )
