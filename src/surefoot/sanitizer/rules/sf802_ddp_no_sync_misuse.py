"""SF802: gradients are never reduced, because every forward ran under no_sync."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from surefoot.core.finding import Certainty, Finding
from surefoot.sanitizer.rules.base import RuleInfo, share
from surefoot.sanitizer.rules.checksums import RankRule, comparisons


class DdpNoSyncMisuse(RankRule):
    """The last wrapped forward of each window had synchronisation off; gradients differ at S."""

    info = RuleInfo(
        code="SF802",
        slug="ddp-no-sync-misuse",
        certainty=Certainty.PROOF,
        title="no_sync() covers the forward that should have averaged the gradients.",
        observes="The last forward of DistributedDataParallel before each step ran with gradient"
        " synchronisation off, in nearly all steps, and gradients differ across ranks when the"
        " optimizer steps. Quiet where the last forward of each window is outside.",
        why="Whether a backward pass reduces is decided in the forward pass: leaving no_sync()"
        " before backward() is too late. Ranks drift apart.",
        example="with model.no_sync():\n    loss = f(model(x))\nloss.backward()",
        fix="Run both forward and backward of the last micro-batch of a window outside no_sync().",
        source="torch.nn.parallel.DistributedDataParallel.no_sync",
    )

    @classmethod
    def across(cls, facts: Mapping[int, Any]) -> Iterable[Finding]:
        for team in comparisons(facts):
            for found in team:
                names = found.unequal - found.reunited
                if not found.never_synchronises or not names or found.averages_weights:
                    continue
                yield cls.report(
                    f"The last forward before {share(found.unsynced, found.windows)} steps ran"
                    " with gradient synchronisation off, and the gradients of ranks"
                    f" {', '.join(map(str, found.ranks))} differ when the optimizer steps.",
                    found.place,
                    evidence={
                        **found.evidence,
                        "steps_of_all_ranks": found.windows,
                        "without_synchronisation": found.unsynced,
                        "different": sorted(names)[:20],
                    },
                )
