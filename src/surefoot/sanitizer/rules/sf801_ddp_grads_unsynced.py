"""SF801: ranks step with different gradients."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from surefoot.core.finding import Certainty, Finding
from surefoot.sanitizer.rules.base import RuleInfo
from surefoot.sanitizer.rules.checksums import Comparison, RankRule, comparisons


class DdpGradsUnsynced(RankRule):
    """Gradient checksums differ across ranks at S."""

    info = RuleInfo(
        code="SF801",
        slug="ddp-grads-unsynced",
        certainty=Certainty.PROOF,
        title="Ranks step with gradients that were not averaged.",
        observes="Digests of the gradients at sampled updates, compared across ranks that wrap a"
        " model in DistributedDataParallel or reduce gradients by hand. A warning where only some"
        " parameters differ. Quiet for shards and parameters that ranks began with different"
        " values of, and where the weights themselves are averaged (local SGD).",
        why="Each rank trains its own model on its own data; what is saved is the model of rank 0,"
        " trained on a part of the data.",
        example="loss = compute(model.module(x))  # around DistributedDataParallel",
        fix="Call the wrapped model, model(x), not model.module(x), in training.",
        source="torch.nn.parallel.DistributedDataParallel",
    )

    @classmethod
    def across(cls, facts: Mapping[int, Any]) -> Iterable[Finding]:
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
    def _finding(cls, comparison: Comparison, names: frozenset[str], nothing: bool) -> Finding:
        # Ranks that only began alike might mean to go their own ways.
        is_proof = nothing and comparison.averages_gradients
        ranks = ", ".join(map(str, comparison.ranks))
        which = "the gradients" if nothing else f"gradients of {len(names)} parameters"
        return cls.report(
            f"At most of {comparison.seen} sampled updates {which} of ranks {ranks} differ when"
            f" the optimizer steps: {', '.join(sorted(names)[:5])}.",
            comparison.place,
            certainty=Certainty.PROOF if is_proof else Certainty.STRONG,
            evidence={
                **comparison.evidence,
                "different": sorted(names)[:20],
                "parameters": len(comparison.shared),
            },
        )
