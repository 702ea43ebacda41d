"""How a process becomes a rank: it joins the group that torch's launcher has prepared, and leaves.

A process that no launcher started stays alone. Nothing here starts a process.
"""

from __future__ import annotations

import atexit
import os
from contextlib import suppress
from datetime import timedelta

import torch
import torch.distributed as dist

from surefoot.core.errors import RankError
from surefoot.observe.watch import FLIGHT_RECORDER, set_where_free
from surefoot.parallel.ranks import FIRST_FAILURE

SIGNS_OF_A_LOST_RANK = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Timed out waiting",
    "NCCL",
)
"""What torch's backends say where the other side is gone; gloo raises a plain RuntimeError."""
JOIN_SECONDS = 300.0


def launched_ranks() -> int:
    """Ranks of the launch that this process belongs to; 1 for a process that stands alone."""
    return int(os.environ.get("WORLD_SIZE", "1")) if "RANK" in os.environ else 1


def join_ranks(timeout_seconds: float = JOIN_SECONDS) -> None:
    """Joins the group that the launcher prepared; does nothing alone, or a second time.

    CPU tensors travel by gloo, CUDA tensors by NCCL. On CUDA the device is that of the local rank.

    Raises:
        RankError: the other ranks did not come.
    """
    if launched_ranks() == 1 or dist.is_initialized():
        return
    backend = "gloo"
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if torch.cuda.is_available() and local_rank < torch.cuda.device_count():
        torch.cuda.set_device(local_rank)
        backend = "cpu:gloo,cuda:nccl"
        set_where_free(FLIGHT_RECORDER)
    try:
        dist.init_process_group(backend, timeout=timedelta(seconds=timeout_seconds))
    except (dist.DistError, RuntimeError, ValueError) as error:
        raise RankError(
            f"rank {os.environ['RANK']} could not join the others: {error}",
            where=f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}",
            rule=f"all {launched_ranks()} ranks meet within {timeout_seconds:g} s",
            remedy="check that each was started, and that this address can be reached from each",
        ) from error
    atexit.register(leave_ranks)


def leave_ranks() -> None:
    """Leaves the group, if this process is in one."""
    if dist.is_initialized():
        dist.destroy_process_group()


def fails_first() -> bool:
    """Whether this rank is the first of all to fail: it alone says why.

    The others then fail for want of it. A rank that cannot ask speaks too.
    """
    if not dist.is_initialized():
        return True
    rank = str(dist.get_rank())
    with suppress(dist.DistError, RuntimeError):
        store = dist.distributed_c10d._get_default_store()
        first: bytes = store.compare_set(FIRST_FAILURE, "", rank)
        return first.decode() == rank
    return False


def is_of_lost_rank(error: BaseException) -> bool:
    """Whether an error, or what caused it, says no more than that another rank is gone."""
    chain: BaseException | None = error
    while chain is not None:
        text = str(chain)
        if isinstance(chain, dist.DistError) or any(sign in text for sign in SIGNS_OF_A_LOST_RANK):
            return True
        chain = chain.__cause__ or chain.__context__
    return False
