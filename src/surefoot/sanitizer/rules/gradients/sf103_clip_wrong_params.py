"""SF103: clipping parameters that no optimizer steps."""

from __future__ import annotations

import weakref
from collections import Counter, defaultdict

import torch

from surefoot.sanitizer import events as ev
from surefoot.sanitizer.matchers.leaves import some_values
from surefoot.sanitizer.rules.base import Findings, Rule, Site, share

LEAST = 3


class ClipWrongParams(Rule, page=__file__):
    """The clipped parameters share nothing with any optimizer that steps."""

    def setup(self) -> None:
        self.pending: list[tuple[Site, frozenset[int], int]] = []
        self.open: dict[Site, frozenset[int]] = {}
        """Parameters of misses whose clipped gradients were neither used nor cleared so far."""
        self.strangers: dict[Site, tuple[weakref.ref[torch.Tensor], tuple[float, ...]]] = {}
        """The last of the clipped tensors that no optimizer holds, and what it was."""
        self.used: Counter[Site] = Counter()
        self.clips: Counter[Site] = Counter()
        self.misses: dict[Site, Counter[int]] = defaultdict(Counter)

    def on_clip(self, event: ev.Clip) -> None:
        if event.inside_step:
            return
        keys = frozenset(state.key for state in event.parameters)
        self.clips[event.site] += 1
        # Weights without a gradient that change all the same follow others (a slow copy).
        fed = [tensor for tensor in event.strangers if tensor.grad is not None]
        if fed:
            self._watch(event.site, fed[-1])
        if len(self.pending) < 64:
            self.pending.append((event.site, keys, self.trace.seq))

    def _watch(self, site: Site, stranger: torch.Tensor) -> None:
        before = self.strangers.get(site)
        if before is not None and before[0]() is stranger and before[1] != some_values(stranger):
            self.used[site] += 1
        if before is not None or len(self.strangers) < 64:
            self.strangers[site] = weakref.ref(stranger), some_values(stranger)

    def on_step_begin(self, event: ev.StepBegin) -> None:
        optimizer = event.optimizer
        mine = {state.key for state in optimizer.parameters}
        fresh = {s.key for s in optimizer.parameters if s.contributions > s.used or s.unknown}
        for site in [site for site, keys in self.open.items() if keys & fresh]:
            self.used[site] += 1
            del self.open[site]
        # Gradients that were assigned by hand come from elsewhere: then the clip may be right.
        by_hand = any(s.touched or s.unknown for s in optimizer.parameters)
        for site, keys, seq in self.pending:
            after_backward = optimizer.window and seq > optimizer.last_backward
            if after_backward and not by_hand and not keys & mine:
                self.misses[site][optimizer.key] += 1
                if len(self.open) < 64:
                    self.open[site] = keys
        self.pending = []

    def on_zero_grad(self, event: ev.ZeroGrad) -> None:
        if self.open:
            zeroed = {state.key for state in event.parameters}
            self.open = {site: keys - zeroed for site, keys in self.open.items()}

    def findings(self) -> Findings:
        for site, misses in self.misses.items():
            key, count = misses.most_common(1)[0]
            if count < LEAST or count < 0.8 * self.clips[site] or self.used[site]:
                continue
            optimizer = next(o for o in self.trace.optimizers if o.key == key)
            message = (
                f"In {share(count, self.clips[site])} calls this clip touched no parameter of"
                f" {optimizer}, the optimizer that steps next, and no other step used what it"
                " clipped."
            )
            yield self.report(message, site, clips=self.clips[site], missed=count)
