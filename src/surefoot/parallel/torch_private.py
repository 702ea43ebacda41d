"""Access to private parts of torch's process groups, in this module only.

Each function states what it returns if this version of torch lacks the private name or has it in
another form; only the store is indispensable. Starts and ends nothing.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from surefoot.core.errors import RankError

_GONE = (AttributeError, TypeError, RuntimeError)
"""Raised by a private name that is missing, takes other arguments, or is of another backend."""


def process_groups() -> list[Any]:
    """The process groups of this process; none if torch does not list them."""
    try:
        return list(dist.distributed_c10d._world.pg_map)
    except _GONE:
        return []


def num_collectives(group: Any) -> int | None:
    """Number of collectives started in a group; None if it is not counted."""
    try:
        return int(group._get_sequence_number_for_group())
    except _GONE:
        return None


def limit_collectives(group: Any, limit: timedelta) -> bool:
    """Sets the timeout of a group's collectives; returns whether that was possible."""
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
