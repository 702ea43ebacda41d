"""Health checks over ranks: replicas of a weight are equal, and no rank is slower than the others.

A flipped bit, or a reduction that one rank missed, changes one replica and no number of the log.
A slow rank delays all others, and no rank's own times show which. Reads; changes nothing.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from surefoot.core.errors import RankError
from surefoot.parallel.parts import local_part
from surefoot.parallel.ranks import Ranks

MAX_NAMED: Final = 5
SLOW_RANK_TIME_SHARE: Final = 0.1
"""A rank is slow if it loses this share of the time, compared with the others."""
INTEGERS: Final = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

Checksums = Mapping[str, int]
"""Parameter and mesh coordinate, such as `head.weight at shard 1`, to the sum of its bits."""


def checksums(parameters: Iterable[tuple[str, Tensor]]) -> dict[str, int]:
    """The sum of each parameter's bits, read as integers, modulo 2**64: detects any flipped bit.

    One kernel per parameter and one synchronization for all. The key includes this rank's
    coordinate along the sharded axes: ranks with the same key hold the same values.
    """
    names, sums = [], []
    for name, parameter in parameters:
        part = local_part(parameter.detach()).contiguous().reshape(-1)
        names.append(f"{name}{place_of(parameter)}")
        sums.append(part.view(INTEGERS[part.element_size()]).sum(dtype=torch.int64))
    numbers: list[int] = torch.stack(sums).tolist() if sums else []
    return dict(zip(names, numbers, strict=True))


def place_of(parameter: Tensor) -> str:
    """This rank's coordinate along the axes that shard a parameter; empty if it is replicated."""
    if not isinstance(parameter, DTensor):
        return ""
    mesh = parameter.device_mesh
    rows = zip(
        mesh.mesh_dim_names or (), mesh.get_coordinate() or (), parameter.placements, strict=True
    )
    stands = [f"{axis} {place}" for axis, place, how in rows if not how.is_replicate()]
    return f" at {', '.join(stands)}" if stands else ""


def refuse_differences(of_ranks: Sequence[Checksums], step: int) -> None:
    """Compares the checksums of values that several ranks hold.

    Args:
        of_ranks: the checksums of each rank, in rank order.
        step: updates completed.

    Raises:
        RankError: some differ; names the ranks that differ from the majority.
    """
    differing = []
    for name in dict.fromkeys(name for sums in of_ranks for name in sums):
        held = {rank: sums[name] for rank, sums in enumerate(of_ranks) if name in sums}
        common = statistics.mode(held.values())
        if odd := [rank for rank, number in held.items() if number != common]:
            differing.append((name, odd))
    if not differing:
        return
    names = ", ".join(name for name, _ in differing[:MAX_NAMED])
    more = len(differing) - MAX_NAMED
    ranks = sorted({rank for _, odd in differing for rank in odd})
    raise RankError(
        f"replicas of a weight are not equal: {names}" + (f" and {more} more" if more > 0 else ""),
        where=f"after update {step}; rank{'s' if len(ranks) > 1 else ''} "
        f"{', '.join(map(str, ranks))} against the others",
        rule="replicas of a weight see the same gradients and stay bit-equal",
        remedy="look for faulty memory on that device, code that changes weights on one rank, or a "
        "random choice in the model; then resume from the newest checkpoint",
    )


@dataclass(frozen=True)
class RankTimes:
    """How one rank spent an interval of the run, in seconds."""

    seconds: float
    own_seconds: Mapping[str, float]
    """Seconds in each phase in which it waits for no other rank."""


def slow_rank(times: Sequence[RankTimes]) -> str | None:
    """Names the rank that loses the most time by itself, and the phase in which it does.

    All ranks take equally long for an update, because they wait for each other; only the time
    in phases without waiting differs.
    """
    if len(times) < 2:
        return None
    excess = [_excess(times, rank) for rank in range(len(times))]
    lost = [sum(max(0.0, more) for more in phases.values()) for phases in excess]
    slow = max(range(len(times)), key=lambda rank: lost[rank])
    if lost[slow] < SLOW_RANK_TIME_SHARE * times[slow].seconds or lost[slow] <= 0.0:
        return None
    phase = max(excess[slow], key=lambda name: excess[slow][name])
    return (
        f"rank {slow} is slow: of {times[slow].seconds:.1f} s it spent {lost[slow]:.1f} s more "
        f"than the others in phases that wait for no other rank, most of it in: {phase}"
    )


def _excess(times: Sequence[RankTimes], rank: int) -> dict[str, float]:
    """Seconds that a rank spent in each phase beyond the median of the others."""
    others = [pace.own_seconds for other, pace in enumerate(times) if other != rank]
    return {
        phase: spent - statistics.median(of.get(phase, 0.0) for of in others)
        for phase, spent in times[rank].own_seconds.items()
    }


class RankHealth:
    """Compares the ranks periodically; every rank calls `check` after the same update.

    Args:
        ranks: of the run.
        parameters: by name, as this rank holds them.
        pace: seconds so far, in total and per phase.
        tell: called with a message about a slow rank.
    """

    def __init__(
        self,
        ranks: Ranks,
        parameters: Sequence[tuple[str, Tensor]],
        pace: Callable[[], RankTimes],
        tell: Callable[[str], None],
    ) -> None:
        self._ranks = ranks
        self._parameters = parameters
        self._pace = pace
        self._tell = tell
        self._before = pace()

    def check(self, step: int) -> None:
        """Compares weights, and the times since the last check.

        Raises:
            RankError: replicas of a weight differ.
        """
        now, before = self._pace(), self._before
        self._before = now
        since = {
            "seconds": now.seconds - before.seconds,
            "own_seconds": {
                phase: spent - before.own_seconds.get(phase, 0.0)
                for phase, spent in now.own_seconds.items()
            },
        }
        told = {"checksums": checksums(self._parameters), "pace": since}
        answers: list[Any] = self._ranks.gather("health", told)
        refuse_differences([answer["checksums"] for answer in answers], step)
        if (text := slow_rank([RankTimes(**answer["pace"]) for answer in answers])) is not None:
            self._tell(text)
