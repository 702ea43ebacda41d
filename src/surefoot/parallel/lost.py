"""Which rank ended a run: recorded once, in the store shared by all ranks and the launcher.

The first to detect it writes it; all others read it. Waits for nothing and ends nothing.
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
"""Rank number that stands for the launcher."""


class How(StrEnum):
    """How a rank was lost."""

    FAILED = "failed"
    """It raised an error, and reports it itself."""
    GONE = "gone"
    """Its process has ended without reporting an error."""
    HANGS = "hangs"
    """It does not reach a point where the others wait for it, or sends no heartbeat."""


@dataclass(frozen=True)
class Failure:
    """What ended the run."""

    rank: int
    how: How
    by: int
    """The rank that reports it."""
    what: str = ""
    where: str = ""

    def error(self, seen_by: str = "") -> RankError:
        """The same as an error."""
        if self.how is How.HANGS:
            return RankError(
                self.what,
                where=self.where,
                rule="a rank sends heartbeats and reaches each exchange with the others within "
                "parallel.deadline",
                remedy="see its stacks: stacks-rank-*.txt in the run's artifacts; raise "
                "parallel.deadline if that takes long",
            )
        gone = self.how is How.GONE
        return RankError(
            f"rank {self.rank} {'is gone' if gone else 'has failed'}"
            + (f": {self.what}" if gone and self.what else ""),
            where=seen_by or self.where,
            rule="a run continues with all of its ranks, or not at all",
            remedy="SIGKILL often means that the machine ran out of memory: see the system's log"
            if gone
            else "see the error of that rank",
        )


def of_attempt(store: dist.Store) -> dist.Store:
    """The part of a shared store that belongs to this start of the ranks.

    The store may outlive an attempt; there is no group prefix, so the launcher sees the same keys.
    """
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return dist.PrefixStore(f"surefoot/attempt-{attempt}", store)


def first_failure(store: dist.Store) -> Failure | None:
    """The failure recorded in the store, if any."""
    if not store.check([FIRST_FAILURE]):
        return None
    return _read(store.get(FIRST_FAILURE))


def claim(store: dist.Store, failure: Failure) -> Failure:
    """Records `failure` unless another came first; returns the one that counts."""
    return _read(store.compare_set(FIRST_FAILURE, "", json.dumps(asdict(failure))))


def _read(text: bytes) -> Failure:
    fields = json.loads(text)
    return Failure(**{**fields, "how": How(fields["how"])})


def named(ranks: Sequence[int]) -> str:
    """A list of ranks for messages."""
    listed = ", ".join(map(str, ranks))
    return f"rank {listed}" if len(ranks) == 1 else f"ranks {listed}"
