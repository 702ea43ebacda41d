"""Joins the process group that torch's launcher has prepared, and leaves it.

A process without a launcher stays a single rank. Starts no process.
"""

from __future__ import annotations

import atexit
import os
import sys
import time
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from surefoot.core.errors import RankError
from surefoot.observe.watch import FLIGHT_RECORDER, set_where_free
from surefoot.parallel import lookout
from surefoot.parallel.lookout import Lookout
from surefoot.parallel.lost import Failure, How, claim, first_failure, named, of_attempt
from surefoot.parallel.torch_private import default_store

LOST_RANK_MESSAGES = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Timed out waiting",
    "NCCL",
)
"""Messages of torch's backends when the other side is gone; gloo raises a plain RuntimeError."""
MAX_JOIN_SECONDS = 300.0
MAX_STORE_WAIT_SECONDS = 5.0
"""How long a rank that fails before it has joined looks for the store of its launch."""
RUN_ID_PREFIX = "surefoot-"
"""Prefix of run ids of our own launcher, which reports lost ranks."""


def launched_ranks() -> int:
    """Number of ranks of the launch that this process belongs to; 1 without a launcher."""
    return int(os.environ.get("WORLD_SIZE", "1")) if "RANK" in os.environ else 1


def join_ranks(timeout_seconds: float = MAX_JOIN_SECONDS) -> None:
    """Joins the group that the launcher prepared; does nothing for one rank or a second call.

    CPU tensors use gloo, CUDA tensors NCCL. On CUDA the device is that of the local rank. From
    then on this rank sends heartbeats and checks those of the others.

    Raises:
        RankError: ranks did not join in time; names those that are missing.
    """
    if launched_ranks() == 1 or dist.is_initialized():
        return
    rank, size = int(os.environ["RANK"]), launched_ranks()
    backend = "gloo"
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if torch.cuda.is_available() and local_rank < torch.cuda.device_count():
        torch.cuda.set_device(local_rank)
        backend = "cpu:gloo,cuda:nccl"
        set_where_free(FLIGHT_RECORDER)
    limit = timedelta(seconds=timeout_seconds)
    try:
        if _by_agent():
            store = launchers_store(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
            _wait_for_all(store, rank, size, timeout_seconds)
        dist.init_process_group(backend, timeout=limit)
    except (dist.DistError, RuntimeError, ValueError) as error:
        raise RankError(
            f"rank {rank} could not join the others: {error}",
            where=f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}",
            rule=f"all {size} ranks join within {timeout_seconds:g} s",
            remedy="check that each rank was started and can reach this address",
        ) from error
    own: Any = shared_store()
    keeper = None if _by_agent() else 0
    lookout.begin(Lookout(own.clone(), rank, size, timeout_seconds, _tell, keeper=keeper))
    atexit.register(leave_ranks)


def shared_store() -> dist.Store:
    """The store that all ranks and the launcher share, without the prefix of the default group."""
    return of_attempt(default_store())


def _store_of_launch() -> dist.Store | None:
    """The same, also before the ranks have joined; None if there is none."""
    if dist.is_initialized():
        return shared_store()
    if launched_ranks() > 1 and _by_agent():
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        return launchers_store(host, port, MAX_STORE_WAIT_SECONDS)
    return None


def _by_agent() -> bool:
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def launchers_store(host: str, port: int, seconds: float = MAX_JOIN_SECONDS) -> dist.Store:
    """A separate connection to the store that torch's launcher keeps for its ranks."""
    limit = timedelta(seconds=seconds)
    return of_attempt(
        dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=limit)
    )


def _wait_for_all(store: dist.Store, rank: int, size: int, seconds: float) -> None:
    """Waits in Python, so that signals are handled and missing ranks are known."""
    keys = [f"here/{other}" for other in range(size)]
    store.set(keys[rank], "")
    until = time.monotonic() + seconds
    while not store.check(keys):
        if (failure := first_failure(store)) is not None:
            raise failure.error(f"the start, seen by rank {rank}")
        if time.monotonic() > until:
            missing = [other for other in range(size) if not store.check([keys[other]])]
            raise RankError(
                f"{named(missing)} did not start within {seconds:g} s",
                where=f"seen by rank {rank}",
                rule="all ranks of a launch start together",
                remedy="check what differs on the machine of that rank",
            )
        time.sleep(0.02)


def leave_ranks() -> None:
    """Leaves the process group, if this process is in one."""
    lookout.end()
    if dist.is_initialized():
        dist.destroy_process_group()


def launcher_tells() -> bool:
    """Whether the launcher is ours: it reports ranks that are killed or hang."""
    return os.environ.get("TORCHELASTIC_RUN_ID", "").startswith(RUN_ID_PREFIX)


def _tell(failure: Failure) -> None:
    # Torch's launcher reports a killed process, and no other loss.
    by_launcher = failure.how is How.GONE and "TORCHELASTIC_RUN_ID" in os.environ
    if not launcher_tells() and not by_launcher:
        print(f"error: {failure.error()}", file=sys.stderr, flush=True)


def fails_first() -> bool:
    """Whether this rank is the first of all to fail: only that one reports why.

    The others fail because it is missing. If the store is gone, no rank can ask, and the launcher
    reports it, except for a rank that never joined.
    """
    with suppress(dist.DistError, RuntimeError):
        store = _store_of_launch()
        if store is None:
            return True
        rank = dist.get_rank() if dist.is_initialized() else int(os.environ["RANK"])
        own = Failure(rank, How.FAILED, rank)
        return claim(store, own) == own
    return not dist.is_initialized() or "TORCHELASTIC_RUN_ID" not in os.environ


def lost_rank(seconds: float) -> Failure | None:
    """The failure that ended the run, as any rank has reported it; waits up to `seconds`."""
    until = time.monotonic() + seconds
    with suppress(dist.DistError, RuntimeError):
        store = _store_of_launch()
        while store is not None:
            failure = first_failure(store)
            if failure is not None or time.monotonic() > until:
                return failure
            time.sleep(0.05)
    return None


def is_of_lost_rank(error: BaseException) -> bool:
    """Whether an error, or its cause, only says that another rank is gone."""
    chain: BaseException | None = error
    while chain is not None:
        text = str(chain)
        if isinstance(chain, dist.DistError) or any(sign in text for sign in LOST_RANK_MESSAGES):
            return True
        chain = chain.__cause__ or chain.__context__
    return False
