"""Which rank ended a run for all: said once, in the store that every rank and the launcher share.

Whoever finds out first leaves it there; all others read it. Nothing here waits or ends anything.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum

import torch.distributed as dist

from surefoot.core.errors import RankError

FIRST_FAILURE = "first-failure"
"""Key of the store."""
LAUNCHER = -1
"""Stands for the launcher where a rank is named."""


class How(StrEnum):
    """What became of a rank."""

    FAILED = "failed"
    """It raised an error, and tells of it itself."""
    GONE = "gone"
    """Its process has ended without a word."""
    HANGS = "hangs"
    """It does not come to where the others wait for it, or its process shows no sign of life."""


@dataclass(frozen=True)
class Failure:
    """What ended the run."""

    rank: int
    how: How
    by: int
    """The rank that says so."""
    what: str = ""
    where: str = ""

    def error(self, seen_by: str = "") -> RankError:
        """The same as an error."""
        if self.how is How.HANGS:
            return RankError(
                self.what,
                where=self.where,
                rule="a rank shows that it lives, and comes to where the others wait for it, "
                "within parallel.deadline",
                remedy="see what it was doing: stacks-rank-*.txt in the run's artifacts; raise "
                "parallel.deadline if that takes long",
            )
        gone = self.how is How.GONE
        return RankError(
            f"rank {self.rank} {'is gone' if gone else 'has failed'}"
            + (f": {self.what}" if gone and self.what else ""),
            where=seen_by or self.where,
            rule="a run goes on with all of its ranks, or not at all",
            remedy="SIGKILL is often the system that ran out of memory: see the system's log"
            if gone
            else "see what that rank says",
        )


def of_attempt(store: dist.Store) -> dist.Store:
    """The part of a shared store that belongs to this start of the ranks.

    The store may outlive them; without the prefix of a group, the launcher sees the same keys.
    """
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return dist.PrefixStore(f"surefoot/attempt-{attempt}", store)


def first_failure(store: dist.Store) -> Failure | None:
    """What somebody has left in the store."""
    if not store.check([FIRST_FAILURE]):
        return None
    return _read(store.get(FIRST_FAILURE))


def claim(store: dist.Store, failure: Failure) -> Failure:
    """Leaves `failure` in the store, unless another came before; returns the one that counts."""
    return _read(store.compare_set(FIRST_FAILURE, "", json.dumps(asdict(failure))))


def _read(text: bytes) -> Failure:
    fields = json.loads(text)
    return Failure(**{**fields, "how": How(fields["how"])})


def named(ranks: Sequence[int]) -> str:
    """Ranks as people name them."""
    listed = ", ".join(map(str, ranks))
    return f"rank {listed}" if len(ranks) == 1 else f"ranks {listed}"
