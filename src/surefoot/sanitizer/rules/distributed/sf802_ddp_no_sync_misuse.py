"""SF802: gradients are never reduced, because every forward ran under no_sync."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from surefoot.sanitizer.rules.base import Findings, share
from surefoot.sanitizer.rules.distributed.checksums import RankRule, comparisons


class DdpNoSyncMisuse(RankRule, page=__file__):
    """The last wrapped forward of each window had synchronisation off; gradients differ."""

    @classmethod
    def across(cls, facts: Mapping[int, Any]) -> Findings:
        for found in (comparison for team in comparisons(facts) for comparison in team):
            names = found.unequal - found.reunited
            if not found.never_synchronises or not names or found.averages_weights:
                continue
            message = (
                f"The last forward before {share(found.unsynced, found.windows)} steps ran with"
                f" gradient synchronisation off, and the gradients of ranks {found.named_ranks}"
                " differ when the optimizer steps."
            )
            yield cls.report(
                message,
                found.place,
                sampled=found.seen,
                ranks=list(found.ranks),
                steps_of_all_ranks=found.windows,
                without_synchronisation=found.unsynced,
                different=sorted(names)[:20],
            )
