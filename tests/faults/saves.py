"""Saves that are killed, damaged or starved of disk, each in processes of its own.

Every tensor of a checkpoint holds the step at which it was saved: a checkpoint that was put
together from two of them shows it, and one whose commit was reported and that cannot be read is
lost.
"""

from __future__ import annotations

import mmap
import os
import signal
import struct
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from surefoot.parallel.ranks import OneRank, Ranks, StoreRanks
from surefoot.state import commit as commit_module
from surefoot.state import durable, retention, tensor_file
from surefoot.state.checkpoint import newest_whole
from surefoot.state.commit import Draft, put_back
from surefoot.state.retention import Keep, Retention
from surefoot.state.saver import SavePolicy, Saver
from surefoot.state.shards import Box, Piece

ROWS, COLUMNS = 64, 128
SHARDED, REPLICATED = ("model/a", "model/b", "optimizer/m"), ("model/c", "average/c")
PROTOCOL = (
    (commit_module, "rename"),
    (commit_module, "sync_path"),
    (commit_module, "write_text"),
    (commit_module, "write_tensors"),
    (commit_module, "replace_text"),
    (commit_module, "digest"),
    (durable, "sync_path"),
    (durable, "rename"),
    (tensor_file, "sync_path"),
    (retention, "rename"),
)
"""Every call of the commit that a disk can refuse and a kill can come before."""
Boundary = Callable[[int, str], None]


@dataclass(frozen=True)
class Trial:
    """How a run of saves goes."""

    ranks: int = 1
    mode: str = "sync"
    slow_rank: int = -1
    """This rank writes slowly; -1 for none."""
    first_step: int = 1
    steps: int = 10**6
    keep: int = 2


class Acknowledged:
    """The last step whose commit was reported, in memory that outlives a killed process."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, 8)

    def put(self, step: int) -> None:
        self._memory[:8] = struct.pack("q", step)

    def get(self) -> int:
        return int(struct.unpack("q", self._memory[:8])[0])


def pieces(step: float, rank: int, size: int) -> list[Piece]:
    """What one rank holds: a block of rows of each sharded tensor, and all of the others."""
    held = []
    first, last = ROWS * rank // size, ROWS * (rank + 1) // size
    for name in SHARDED:
        box = Box((first, 0), (last - first, COLUMNS))
        held.append(Piece(name, (ROWS, COLUMNS), box, torch.full(box.sizes, float(step))))
    for name in REPLICATED:
        whole = Box.whole((COLUMNS,))
        held.append(Piece(name, (COLUMNS,), whole, torch.full((COLUMNS,), float(step))))
    return held


def save_on(rank: int, folder: Path, trial: Trial, store: str, done: Acknowledged) -> None:
    """The life of one rank: it saves step after step."""
    ranks: Ranks = OneRank()
    if trial.ranks > 1:
        shared = dist.FileStore(store, trial.ranks)
        shared.set_timeout(timedelta(seconds=30))
        ranks = StoreRanks(shared, rank, trial.ranks, deadline_seconds=30.0)
    letting_go = Retention(folder, Keep(latest=trial.keep, best=0))

    def tell(kind: str, message: str, data: object) -> None:
        if rank == 0 and kind == "save":
            done.put(int(message.split("-")[-1]))

    policy = SavePolicy(trial.mode, "stop")  # type: ignore[arg-type]
    saver = Saver(folder, policy, letting_go, ranks, tell)
    if rank == trial.slow_rank:
        slow_down()
    for step in range(trial.first_step, trial.first_step + trial.steps):
        live = pieces(step, rank, trial.ranks)
        saver.save(Draft(step, live, {"step": step}, {}))
        for piece in live:
            # The training goes on: what is being written beside it must not see this.
            piece.data.fill_(-1.0)
        saver.poll()
    saver.finish()


def slow_down() -> None:
    real = commit_module.write_tensors

    def slowly(*args: object) -> object:
        time.sleep(0.02)
        return real(*args)  # type: ignore[arg-type]

    commit_module.write_tensors = slowly  # type: ignore[assignment]


def start(
    folder: Path,
    trial: Trial,
    done: Acknowledged,
    boundary: Boundary | None = None,
    watched: int = 0,
) -> list[int]:
    """Forks one process a rank; returns their ids. `boundary` hears of the calls of one rank."""
    with tempfile.NamedTemporaryFile(prefix="surefoot-store-", delete=False) as file:
        store = file.name
    os.unlink(store)
    children = []
    for rank in range(trial.ranks):
        child = os.fork()
        if child == 0:
            status = 1
            try:
                torch.set_num_threads(1)
                if boundary is not None and rank == watched:
                    watch(boundary)
                save_on(rank, folder, trial, store, done)
                status = 0
            except BaseException:
                if os.environ.get("SHOW_TRIALS"):
                    traceback.print_exc()
            finally:
                sys.stdout.flush()
                os._exit(status)
        children.append(child)
    return children


def watch(boundary: Boundary) -> None:
    """Calls `boundary(n, name)` before the n-th call of the protocol."""
    count = 0

    def watched(real: Callable[..., object], name: str) -> Callable[..., object]:
        def call(*args: object) -> object:
            nonlocal count
            count += 1
            boundary(count, name)
            return real(*args)

        return call

    for module, name in PROTOCOL:
        setattr(module, name, watched(getattr(module, name), name))


def end(children: list[int], number: int = signal.SIGKILL) -> None:
    """Sends the signal to all, and waits for them."""
    for child in children:
        try:
            os.kill(child, number)
        except ProcessLookupError:
            continue
    for child in children:
        os.waitpid(child, 0)


def wait(
    children: list[int], deadline_seconds: float = 60.0, *, end_survivors: bool = False
) -> list[int]:
    """Waits for all; the exit codes, negative for a signal.

    Args:
        children: their process ids.
        deadline_seconds: longest wait.
        end_survivors: once one was killed, kills the others, which would wait for it.

    Raises:
        TimeoutError: one has not ended.
    """
    until = time.monotonic() + deadline_seconds
    codes: dict[int, int] = {}
    while len(codes) < len(children):
        for child in children:
            if child not in codes:
                ended, status = os.waitpid(child, os.WNOHANG)
                if ended:
                    codes[child] = os.waitstatus_to_exitcode(status)
                    if codes[child] < 0 and end_survivors:
                        time.sleep(0.02)
                        for other in children:
                            if other not in codes:
                                os.kill(other, signal.SIGKILL)
        if time.monotonic() > until:
            end([child for child in children if child not in codes])
            raise TimeoutError("a rank of a save hangs")
        time.sleep(0.002)
    return [codes[child] for child in children]


def check(folder: Path, acknowledged: int, *, resuming: bool = True) -> int:
    """Reads the newest checkpoint, as a resume does; returns its step.

    Raises:
        AssertionError: a commit that was reported is lost, or a checkpoint is mixed.
    """
    if resuming:
        put_back(folder)
    path, manifest, snapshot, refused = newest_whole(folder)
    assert not refused, refused
    assert manifest.step >= acknowledged, f"{path.name} is newest, {acknowledged} was reported"
    assert snapshot.values["step"] == manifest.step
    for name in (*SHARDED, *REPLICATED):
        tensor = snapshot.tensors[name]
        assert (tensor == float(manifest.step)).all(), f"{name} in {path.name} is mixed"
    assert set(snapshot.tensors) == {*SHARDED, *REPLICATED}
    return manifest.step
