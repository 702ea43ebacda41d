"""SF510: weights that were equal by design drift apart."""

from __future__ import annotations

import weakref

import torch

from surefoot.sanitizer import events as ev
from surefoot.sanitizer.rules.base import NOWHERE, Findings, Rule
from surefoot.sanitizer.rules.coverage.ties import Ties
from surefoot.sanitizer.trace import Trace

MOST_PARAMETERS = 2_000
LEAST_VALUES = 24
LOOKS = 3
SOME = 0.5
TRANSPOSED = "each other's transpose"


class _Pair:
    def __init__(
        self, one: torch.Tensor, two: torch.Tensor, how: str, names: tuple[str, str]
    ) -> None:
        self.one, self.two = weakref.ref(one), weakref.ref(two)
        self.how = how
        self.names = names
        self.difference = 0.0
        self.trained = False

    def look(self, trace: Trace) -> None:
        """Looks at both while they are there."""
        one, two = self.one(), self.two()
        if one is None or two is None:
            return
        other = two.detach().t() if self.how == TRANSPOSED else two.detach()
        if other.shape == one.shape:
            self.difference = float((one.detach() - other).abs().max())
        states = [trace.parameters.find(one), trace.parameters.find(two)]
        self.trained = all(state is not None and state.backwards for state in states)


class TiedWeightsBroken(Rule, page=__file__):
    """Two parameters equal at init, both trained, diverge."""

    def setup(self) -> None:
        self.looks = 0
        self.site = NOWHERE
        self.pairs: list[_Pair] = []
        self.ties = self.use(Ties)

    def on_backward_begin(self, event: ev.BackwardBegin) -> None:
        if not event.walk:
            return
        for one, two, site in self.ties.broken(event.leaves):
            names = self.trace.names.of(one), self.trace.names.of(two)
            self.pairs.append(_Pair(one, two, f"one parameter (shared at {site})", names))
            self.site = event.site
        if self.looks >= LOOKS or self.trace.updates:
            return
        self.looks += 1
        self.site = event.site
        matrices = [
            leaf
            for leaf in event.leaves
            if leaf.dim() == 2 and leaf.device.type == "cpu" and leaf.numel() >= LEAST_VALUES
        ][:MOST_PARAMETERS]
        self._compare_rows(matrices)
        by_sum: dict[float, list[torch.Tensor]] = {}
        for matrix in matrices:
            plain = matrix.detach()
            # Sums of the same numbers in another order differ in the last bits.
            key = round(float(plain.double().sum()), 6)
            for other in by_sum.get(key, ()):
                self._compare(other, matrix)
            by_sum.setdefault(key, []).append(matrix)

    def _compare(self, one: torch.Tensor, two: torch.Tensor) -> None:
        a, b = one.detach(), two.detach()
        if float(a.std()) == 0 or len(self.pairs) > 100:
            return
        names = self.trace.names.of(one), self.trace.names.of(two)
        kinds = self.trace.names.owner_kind(one), self.trace.names.owner_kind(two)
        if a.shape == b.shape[::-1] and torch.equal(a, b.t()):
            self.pairs.append(_Pair(one, two, TRANSPOSED, names))
        elif a.shape == b.shape and kinds[0] != kinds[1] and torch.equal(a, b):
            self.pairs.append(_Pair(one, two, "equal", names))

    def _compare_rows(self, matrices: list[torch.Tensor]) -> None:
        # A vocabulary that grew: the rows it had are equal, those that were added are not.
        kinds = [self.trace.names.owner_kind(matrix) for matrix in matrices]
        for one in (m for m, kind in zip(matrices, kinds, strict=True) if "Embedding" in kind):
            for two, kind in zip(matrices, kinds, strict=True):
                if two.shape != one.shape or "Embedding" in kind or len(self.pairs) > 100:
                    continue
                equal = (one.detach() == two.detach()).all(1) & one.detach().any(1)
                if SOME * len(equal) <= int(equal.sum()) < len(equal):
                    names = self.trace.names.of(one), self.trace.names.of(two)
                    self.pairs.append(_Pair(one, two, "equal in most rows", names))

    def on_step_end(self, event: ev.StepEnd) -> None:
        if self.pairs and self.trace.updates & (self.trace.updates - 1) == 0:
            for pair in self.pairs:
                pair.look(self.trace)

    def findings(self) -> Findings:
        for pair in self.pairs:
            difference = pair.difference
            if not difference or not pair.trained:
                continue
            message = (
                f"{pair.names[0]} and {pair.names[1]} were {pair.how} before training and differ by"
                f" up to {difference:.3g} after {self.trace.updates} updates: they are not tied."
            )
            yield self.report(
                message,
                self.site,
                parameters=list(pair.names),
                difference=difference,
                updates=self.trace.updates,
            )
