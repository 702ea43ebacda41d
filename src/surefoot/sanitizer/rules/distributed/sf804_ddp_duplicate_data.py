"""SF804: ranks train on the same batches."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

from surefoot.sanitizer import events as ev
from surefoot.sanitizer import graph
from surefoot.sanitizer.matchers import fingerprints
from surefoot.sanitizer.rules.base import NOWHERE, Findings, Site, share
from surefoot.sanitizer.rules.distributed.checksums import RankRule, comparisons, teams

MOST_BATCHES = 64
MOST_INPUTS = 4
LEAST = 3
SHARE = 0.8


class DdpDuplicateData(RankRule, page=__file__):
    """Equal batch fingerprints on two ranks in several steps."""

    def setup(self) -> None:
        super().setup()
        self.digests: list[str] = []
        self.site: Site = NOWHERE

    def on_forward_begin(self, event: ev.ForwardBegin) -> None:
        if not event.grad_enabled or len(self.digests) >= MOST_BATCHES or self.trace.rank is None:
            return
        # A few batches only: even on a device, reading them costs little.
        values = itertools.islice(graph.tensors_in(event.inputs), MOST_INPUTS)
        digests = [fingerprints.of_batch(tensor, deep=True) for tensor in values if tensor.numel()]
        if digests:
            self.digests.append(" ".join(map(str, digests)))
            self.site = event.site

    def facts(self) -> Any:
        shared = self.sums.facts()
        if shared is None or len(set(self.digests)) < LEAST:
            return None
        return {**shared, "digests": self.digests, "place": list(self.site)}

    @classmethod
    def across(cls, facts: Mapping[int, Any]) -> Findings:
        for team in teams(facts):
            if any(c.unequal & c.began_apart for c in itertools.chain(*comparisons(team))):
                continue  # each rank holds a part of the model
            for one, two in itertools.combinations(team, 2):
                pairs = list(zip(team[one]["digests"], team[two]["digests"], strict=False))
                same = sum(a == b for a, b in pairs)
                if same >= LEAST and same >= SHARE * len(pairs):
                    message = (
                        f"Ranks {one} and {two} had the same input in {share(same, len(pairs))}"
                        " training forwards."
                    )
                    yield cls.report(
                        message,
                        Site(*team[one]["place"]),
                        ranks=[one, two],
                        same=same,
                        compared=len(pairs),
                    )
                    break
