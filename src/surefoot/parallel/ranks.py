"""The ranks of a run as its control sees them: exchange of host values, with a deadline.

Touches no tensor of the model and no device, and pickles nothing. Numbers of the update itself
(denominators, norms) go through `collectives`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch.distributed as dist

from surefoot.core.errors import RankError
from surefoot.parallel import lookout
from surefoot.parallel.lost import Failure, How, claim, first_failure, named, of_attempt
from surefoot.parallel.torch_private import default_store

POLL_SECONDS = 0.002
"""First pause between two polls for a missing answer; doubles up to `MAX_POLL_SECONDS`."""
MAX_POLL_SECONDS = 0.1


class Ranks(Protocol):
    """All ranks of a run."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def gather(self, what: str, value: Any) -> list[Any]:
        """Every rank's JSON value, in rank order, on every rank.

        Every rank calls it at the same point of the run with the same `what`.

        Raises:
            RankError: a rank did not answer before the deadline; it is named.
        """
        ...

    def channel(self, name: str) -> Ranks:
        """The same ranks with separate exchanges: for another thread."""
        ...


class OneRank:
    """A run of one process."""

    rank = 0
    size = 1

    def gather(self, what: str, value: Any) -> list[Any]:
        """The value itself."""
        return [value]

    def channel(self, name: str) -> OneRank:
        return self


class StoreRanks:
    """Ranks that exchange values through the key-value store of the process group.

    Unlike a collective, a store shows who is missing: each rank writes its answer under its own
    key, and the others poll for it.

    Args:
        store: shared by all ranks, such as a `torch.distributed.TCPStore`.
        rank: of this process.
        size: number of ranks.
        deadline_seconds: longest wait for the slowest rank.
        name: of this channel; exchanges of two channels never mix.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        size: int,
        deadline_seconds: float = 300.0,
        name: str = "control",
    ) -> None:
        self.rank = rank
        self.size = size
        self._store = store
        self._deadline_seconds = deadline_seconds
        self._name = name
        self._count = 0

    def channel(self, name: str) -> StoreRanks:
        """The same ranks under other keys of the store."""
        return StoreRanks(self._store, self.rank, self.size, self._deadline_seconds, name)

    def gather(self, what: str, value: Any) -> list[Any]:
        """Writes this rank's answer to the store and collects those of all."""
        self._count += 1
        self._store.set(self._key(self._count, self.rank), json.dumps([what, value]))
        self._wait(what)
        answers = [
            json.loads(self._store.get(self._key(self._count, rank))) for rank in range(self.size)
        ]
        if self._count > 1:
            # Whoever has answered now has read all answers of the exchange before.
            self._store.delete_key(self._key(self._count - 1, self.rank))
        self._refuse_other_places(what, [answer[0] for answer in answers])
        return [answer[1] for answer in answers]

    def _wait(self, what: str) -> None:
        until = time.monotonic() + self._deadline_seconds
        pause = POLL_SECONDS
        keys = [self._key(self._count, rank) for rank in range(self.size)]
        while not self._store.check(keys):
            if (failure := first_failure(self._store)) is not None:
                if (watch := lookout.current()) is not None:
                    watch.write_stacks_of_all(self._store, failure)
                raise failure.error(f"{what}, seen by rank {self.rank}")
            if time.monotonic() > until:
                missing = [rank for rank, key in enumerate(keys) if not self._store.check([key])]
                if missing:
                    said = f"{named(missing)} did not answer within {self._deadline_seconds:g} s"
                    place = f"{what}, seen by rank {self.rank}"
                    failure = Failure(missing[0], How.HANGS, self.rank, said, place)
                    if (watch := lookout.current()) is None:
                        raise claim(self._store, failure).error(place)
                    failure = watch.accuse(self._store, failure)
                    watch.write_stacks_of_all(self._store, failure)
                    raise failure.error(place)
            time.sleep(pause)
            pause = min(2 * pause, MAX_POLL_SECONDS)

    def _refuse_other_places(self, what: str, places: Sequence[str]) -> None:
        others = [rank for rank, place in enumerate(places) if place != what]
        if others:
            raise RankError(
                f"{named(others)} came to '{places[others[0]]}', not to '{what}'",
                where=f"rank {self.rank}",
                rule="all ranks run the same steps in the same order",
                remedy="look for a branch that depends on the rank",
            )

    def _key(self, count: int, rank: int) -> str:
        return f"{self._name}/{count}/{rank}"


def any_of(ranks: Ranks, what: str, flag: bool) -> bool:
    """Whether any rank passed True; the same answer on all."""
    return any(ranks.gather(what, flag))


def from_first(ranks: Ranks, what: str, value: Any) -> Any:
    """Rank 0's value, on every rank."""
    return ranks.gather(what, value if ranks.rank == 0 else None)[0]


def world_ranks(deadline_seconds: float = 300.0) -> Ranks:
    """The ranks of the default process group; `OneRank` if there is none."""
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return OneRank()
    if (watch := lookout.current()) is not None:
        watch.wait_at_most(deadline_seconds)
    store = of_attempt(default_store())
    store.set_timeout(timedelta(seconds=deadline_seconds))
    return StoreRanks(store, dist.get_rank(), dist.get_world_size(), deadline_seconds)
