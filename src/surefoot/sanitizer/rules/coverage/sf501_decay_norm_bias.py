"""SF501: normalisation weights and biases are decayed."""

from __future__ import annotations

from surefoot.sanitizer import events as ev
from surefoot.sanitizer.matchers.leaves import listed
from surefoot.sanitizer.rules.base import Findings, Rule, Site


class DecayNormBias(Rule, page=__file__):
    """weight_decay > 0 on parameters of norm modules or 1-D ones."""

    def setup(self) -> None:
        self.done: set[int] = set()
        self.found: list[tuple[str, float, list[str], int, Site]] = []

    def on_step_end(self, event: ev.StepEnd) -> None:
        optimizer = event.optimizer
        if optimizer.key in self.done or len(self.done) > 1000:
            return
        self.done.add(optimizer.key)
        if optimizer.kind == "SGD":
            return
        groups = optimizer.groups()
        split = len({group.get("weight_decay") for group in groups}) > 1
        norms, biases, decay = [], 0, 0.0
        for group in groups:
            if not group.get("weight_decay"):
                continue
            for tensor in group["params"]:
                if "Norm" in self.trace.names.owner_kind(tensor):
                    norms.append(self.trace.names.of(tensor))
                    decay = group["weight_decay"]
                elif tensor.dim() == 1:
                    biases += 1
                    decay = group["weight_decay"]
        if norms or (split and biases):
            self.found.append((optimizer.kind, decay, norms, biases, optimizer.site))

    def findings(self) -> Findings:
        for kind, decay, norms, biases, site in self.found:
            what = f"{len(norms)} parameters of normalisation layers ({listed(norms, 4)})"
            if not norms:
                what = f"{biases} parameters with one dimension"
            yield self.report(
                f"{kind} decays {what} by {decay:g}.",
                site,
                weight_decay=decay,
                norms=norms[:20],
                biases=biases,
            )
