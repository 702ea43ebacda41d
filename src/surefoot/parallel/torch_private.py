"""What this folder needs of torch's process groups and torch keeps private: read here alone.

Each function says what it returns where this torch does not have it any more, or has it in another
form; only the store cannot be done without. It starts and ends nothing.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from surefoot.core.errors import RankError

_GONE = (AttributeError, TypeError, RuntimeError)
"""What a private name raises that is gone, takes other arguments, or serves another backend."""


def process_groups() -> list[Any]:
    """The process groups that this process is in; none where torch does not list them."""
    try:
        return list(dist.distributed_c10d._world.pg_map)
    except _GONE:
        return []


def num_collectives(group: Any) -> int | None:
    """Collectives that were begun in a group; None where it does not count them."""
    try:
        return int(group._get_sequence_number_for_group())
    except _GONE:
        return None


def limit_collectives(group: Any, limit: timedelta) -> bool:
    """Sets how long a collective may wait; whether that could be set for this group."""
    try:
        dist.distributed_c10d._set_pg_timeout(limit, group)
    except _GONE:
        return False
    return True


def default_store() -> dist.Store:
    """The store of the default process group.

    Raises:
        RankError: torch does not give it away.
    """
    try:
        return dist.distributed_c10d._get_default_store()
    except (AttributeError, TypeError) as error:
        raise RankError(
            f"torch {torch.__version__} does not give away the store of its process group",
            where="torch.distributed.distributed_c10d._get_default_store",
            rule="ranks tell each other of failures through that store",
            remedy="use a torch that Surefoot declares (pip check); one process needs no store",
        ) from error
