"""SF803: ranks hold different weights."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from surefoot.core.finding import Certainty, Finding
from surefoot.sanitizer.rules.base import RuleInfo
from surefoot.sanitizer.rules.checksums import RankRule, comparisons

RESTORE = "Restore the same optimizer state, and set the same rates, on every rank."


class DdpParamsDiverge(RankRule):
    """Parameter checksums differ across ranks although their gradients are equal."""

    info = RuleInfo(
        code="SF803",
        slug="ddp-params-diverge",
        certainty=Certainty.PROOF,
        title="Ranks hold different weights although they share gradients.",
        observes="Digests of weights and gradients at sampled updates, across ranks: weights that"
        " differ where gradients are equal. Quiet for sharded parameters.",
        why="The averaged gradient belongs to none of the models: each rank moves from another"
        " start, and only one of them is saved.",
        example="torch.manual_seed(rank)\nmodel = Net()  # and gradients averaged by all_reduce",
        fix="Broadcast the weights of rank 0 before training, or use DistributedDataParallel.",
        source="torch.nn.parallel.DistributedDataParallel (weights are broadcast at construction)",
    )

    @classmethod
    def across(cls, facts: Mapping[int, Any]) -> Iterable[Finding]:
        for team in comparisons(facts):
            for found in team:
                if found.unequal:
                    continue  # the gradients are the cause, and another rule's
                # A gradient of zeros is equal everywhere and tells nothing.
                names = (found.apart & found.shared) - found.always_zero
                if not names:
                    continue
                began = names <= found.began_apart
                why = (
                    "they did not start from the same weights"
                    if began
                    else "they started alike, so the optimizers' states or settings differ"
                )
                yield cls.report(
                    f"At most of {found.seen} sampled updates the weights of ranks"
                    f" {', '.join(map(str, found.ranks))} differ, although their gradients are"
                    f" equal: {why}.",
                    found.place,
                    fix=cls.info.fix if began else RESTORE,
                    evidence={
                        **found.evidence,
                        "different": sorted(names)[:20],
                        "differed_at_first": began,
                    },
                )
