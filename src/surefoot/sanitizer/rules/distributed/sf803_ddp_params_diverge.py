"""SF803: ranks hold different weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from surefoot.sanitizer.rules.base import Findings
from surefoot.sanitizer.rules.distributed.checksums import RankRule, comparisons

RESTORE = "Restore the same optimizer state, and set the same rates, on every rank."


class DdpParamsDiverge(RankRule, page=__file__):
    """Digests of weights differ across ranks although their gradients are equal."""

    @classmethod
    def across(cls, facts: Mapping[int, Any]) -> Findings:
        for found in (comparison for team in comparisons(facts) for comparison in team):
            # A gradient of zeros is equal everywhere and tells nothing.
            names = (found.apart & found.shared) - found.always_zero
            if found.unequal or not names:
                continue  # where gradients differ they are the cause, and another rule's
            began = names <= found.began_apart
            why = (
                "they did not start from the same weights"
                if began
                else "they started alike, so the optimizers' states or settings differ"
            )
            message = (
                f"At most of {found.seen} sampled updates the weights of ranks"
                f" {found.named_ranks} differ, although their gradients are equal: {why}."
            )
            yield cls.report(
                message,
                found.place,
                fix=cls.info.fix if began else RESTORE,
                sampled=found.seen,
                ranks=list(found.ranks),
                different=sorted(names)[:20],
                differed_at_first=began,
            )
