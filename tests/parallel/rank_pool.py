"""A few processes that stay, and play the ranks of one case after the other.

Starting a process costs seconds, joining a group milliseconds. What a case raises on any rank is
raised in the test, with the rank that failed first.
"""

from __future__ import annotations

import multiprocessing
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

CASE_SECONDS = 120.0
COLLECTIVE_SECONDS = 30.0


class CaseFailed(AssertionError):
    """A rank raised; holds what and where, and the error itself."""

    def __init__(self, rank: int, trace: str, error: BaseException) -> None:
        super().__init__(f"rank {rank}:\n{trace}")
        self.rank = rank
        self.error = error


def play(connection: Connection, gpu: int | None) -> None:
    """One process: takes a case, joins its group, runs it, answers."""
    torch.set_num_threads(1)
    backend = "gloo"
    if gpu is not None:
        torch.cuda.set_device(gpu)
        backend = "cpu:gloo,cuda:nccl"
    while True:
        told = connection.recv()
        if told is None:
            return
        path, rank, size, function, arguments = told
        try:
            store = dist.FileStore(path, size)
            limit = timedelta(seconds=COLLECTIVE_SECONDS)
            dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=limit)
            try:
                answer: Any = ("done", function(*arguments))
            finally:
                dist.destroy_process_group()
        except BaseException as error:
            answer = ("failed", time.monotonic(), traceback.format_exc(), _portable(error))
        connection.send(answer)


def _portable(error: BaseException) -> BaseException:
    return error if type(error).__module__.startswith("surefoot") else RuntimeError(str(error))


class RankPool:
    """Up to `size` ranks on this machine, each with a GPU of its own where `on_gpus`."""

    def __init__(self, size: int, on_gpus: bool = False) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["surefoot.assembly.run_parts", "torch.distributed.fsdp"])
        self._folder = tempfile.TemporaryDirectory()
        self._cases = 0
        self._ends, self._processes = [], []
        for rank in range(size):
            ours, theirs = context.Pipe()
            gpu = rank if on_gpus else None
            process = context.Process(target=play, args=(theirs, gpu), daemon=True)
            process.start()
            self._ends.append(ours)
            self._processes.append(process)

    def run(self, num_ranks: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """What `function(*arguments)` returns on each of `num_ranks` ranks.

        Raises:
            CaseFailed: a rank raised; the first one to do so.
        """
        self._cases += 1
        path = str(Path(self._folder.name) / f"case-{self._cases}")
        ends = self._ends[:num_ranks]
        for rank, end in enumerate(ends):
            end.send((path, rank, num_ranks, function, arguments))
        answers: dict[int, Any] = {}
        until = time.monotonic() + CASE_SECONDS
        while len(answers) < num_ranks:
            ready = wait([e for e in ends if ends.index(e) not in answers], timeout=1.0)
            for end in ready:
                answers[ends.index(end)] = end.recv()  # type: ignore[union-attr, arg-type]
            assert time.monotonic() < until, f"only ranks {sorted(answers)} have answered"
        failed = [(a[1], rank, a) for rank, a in answers.items() if a[0] == "failed"]
        if failed:
            _, rank, answer = min(failed, key=lambda f: f[:2])
            raise CaseFailed(rank, answer[2], answer[3])
        return [answers[rank][1] for rank in range(num_ranks)]

    def close(self) -> None:
        for end in self._ends:
            end.send(None)
        for process in self._processes:
            process.join(5)
            if process.is_alive():
                process.kill()
        self._folder.cleanup()
