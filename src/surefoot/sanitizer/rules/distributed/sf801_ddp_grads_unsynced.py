"""SF801: ranks step with different gradients."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from surefoot.sanitizer.rules.base import Certainty, Finding, Findings
from surefoot.sanitizer.rules.distributed.checksums import RankComparison, RankRule, comparisons


class DdpGradsUnsynced(RankRule, page=__file__):
    """Digests of gradients differ across ranks when the optimizer steps."""

    @classmethod
    def across(cls, facts: Mapping[int, Any]) -> Findings:
        for team in comparisons(facts):
            nothing_shared = all(c.shared <= c.unequal | c.always_zero for c in team)
            for comparison in team:
                if comparison.never_synchronises or comparison.averages_weights:
                    continue  # another rule's, or ranks that are brought together later
                names = comparison.unequal - comparison.reunited
                if not nothing_shared:
                    # A parameter that began apart is a rank's own: a shard, an expert.
                    names = names - comparison.began_apart
                    names = names if names & comparison.apart else frozenset()
                if names:
                    yield cls._finding(comparison, names, nothing_shared)

    @classmethod
    def _finding(cls, comparison: RankComparison, names: frozenset[str], nothing: bool) -> Finding:
        # Ranks that only began alike might mean to go their own ways.
        is_proof = nothing and comparison.averages_gradients
        which = "the gradients" if nothing else f"gradients of {len(names)} parameters"
        message = (
            f"At most of {comparison.seen} sampled updates {which} of ranks"
            f" {comparison.named_ranks} differ when the optimizer steps:"
            f" {', '.join(sorted(names)[:5])}."
        )
        return cls.report(
            message,
            comparison.place,
            certainty=Certainty.PROOF if is_proof else Certainty.STRONG,
            sampled=comparison.seen,
            ranks=list(comparison.ranks),
            different=sorted(names)[:20],
            parameters=len(comparison.shared),
        )
