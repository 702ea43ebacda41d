"""SF804: ranks train on the same batches."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch.distributed as dist

from surefoot.core.finding import Certainty, Finding
from surefoot.sanitizer import events as ev
from surefoot.sanitizer.frames import NOWHERE, Site
from surefoot.sanitizer.rules import fingerprints
from surefoot.sanitizer.rules.base import Rule, RuleInfo, share
from surefoot.sanitizer.trace import Trace

MOST_BATCHES = 64
LEAST = 3
SHARE = 0.8


class DdpDuplicateData(Rule):
    """Equal batch fingerprints on two ranks in several steps."""

    info = RuleInfo(
        code="SF804",
        slug="ddp-duplicate-data",
        certainty=Certainty.PROOF,
        title="Ranks train on the same batches.",
        observes="Digests of the inputs of the first training forwards, compared across ranks"
        " that share gradients: equal in nearly all of them. Quiet where a rank's own batches are"
        " all the same.",
        why="Every rank computes the same gradient: the global batch is that of one rank, and the"
        " other devices are paid for nothing.",
        example="DataLoader(data, shuffle=True)  # same seed on all ranks, no DistributedSampler",
        fix="Give each rank its part: DistributedSampler(data), or a seed that depends on the"
        " rank.",
        source="torch.utils.data.DistributedSampler",
    )

    def __init__(self, trace: Trace) -> None:
        super().__init__(trace)
        self.digests: list[int] = []
        self.replicates = False
        self.site: Site = NOWHERE

    def on_parallel_wrapped(self, event: ev.ParallelWrapped) -> None:
        self.replicates = True

    def on_collective(self, event: ev.Collective) -> None:
        self.replicates = self.replicates or event.on_gradient

    def on_forward_begin(self, event: ev.ForwardBegin) -> None:
        if not event.grad_enabled or len(self.digests) >= MOST_BATCHES:
            return
        if not (dist.is_available() and dist.is_initialized()):
            return
        tensor = fingerprints.first_tensor((*event.arguments, *event.keywords.values()))
        # A few batches only: even on a device, reading them costs little.
        digest = None if tensor is None else fingerprints.of_batch(tensor, deep=True)
        if digest is not None:
            self.digests.append(digest)
            self.site = event.site

    def facts(self) -> Any:
        if not self.replicates or len(set(self.digests)) < LEAST:
            return None
        return {"digests": self.digests, "place": list(self.site)}

    def findings(self) -> Iterable[Finding]:
        return ()

    @classmethod
    def across(cls, facts: Mapping[int, Any]) -> Iterable[Finding]:
        ranks = sorted(facts)
        for i, one in enumerate(ranks):
            for two in ranks[i + 1 :]:
                pairs = list(zip(facts[one]["digests"], facts[two]["digests"], strict=False))
                same = sum(a == b for a, b in pairs)
                if same >= LEAST and same >= SHARE * len(pairs):
                    yield cls.report(
                        f"Ranks {one} and {two} had the same input in {share(same, len(pairs))}"
                        " training forwards.",
                        Site(*facts[one]["place"]),
                        evidence={"ranks": [one, two], "same": same, "compared": len(pairs)},
                    )
                    return
