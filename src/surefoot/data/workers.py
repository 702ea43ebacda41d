"""Worker processes that fetch batches, with a deadline for each answer.

Tasks go round robin to a fixed set of processes and come back in order, so the number of workers
cannot change what is loaded. Every wait is bounded: a dead worker is reported at once and a stuck
one within the deadline, with worker id, process id and sample ids.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import select
import signal
import sys
import time
import traceback
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from typing import Any, Literal

import torch

from surefoot.core.errors import DataError, LoaderStuckError, RequestError, SurefootError
from surefoot.core.interruption import CutShort, ShouldAbort, never
from surefoot.data.order import IndexArray
from surefoot.data.transport import Channel, TransportClosed, TransportTimeout

StartMethod = Literal["platform", "fork", "spawn"]
Fetch = Callable[[int, IndexArray], Any]

_READY = "ready"
# Time for a worker to start, in addition to the deadline: a spawned one imports torch first.
_START_SECONDS = 60.0
# Time for a worker to exit by itself before it is killed.
_GRACE_SECONDS = 1.0
# Longest single sleep: time in which this process itself was stopped is not counted against a
# worker.
_SLICE_SECONDS = 1.0
_ORPHAN_CHECK_SECONDS = 5.0
_OF_THE_TRAINING = {signal.SIGINT, signal.SIGTERM, signal.SIGUSR1}

_pools: weakref.WeakSet[WorkerPool] = weakref.WeakSet()


@dataclass(eq=False)
class _Worker:
    id: int
    process: BaseProcess
    channel: Channel
    poll: select.poll = field(default_factory=select.poll)
    started: bool = False
    asked: deque[list[int]] = field(default_factory=deque)
    """Sample ids of its unanswered tasks."""

    def __str__(self) -> str:
        return f"data worker {self.id} (pid {self.process.pid})"


class WorkerPool:
    """A fixed set of worker processes, started on construction.

    Args:
        fetch: `fetch(epoch, indices)`, run in the workers.
        num_workers: number of processes, at least 1.
        prefetch: tasks given to each worker in advance.
        deadline_seconds: longest wait for one answer.
        start_method: of the processes.

    Raises:
        RequestError: the source or the weight function cannot be sent to a spawned worker.
    """

    def __init__(
        self,
        fetch: Fetch,
        *,
        num_workers: int,
        prefetch: int,
        deadline_seconds: float,
        start_method: StartMethod,
    ) -> None:
        self._deadline = deadline_seconds
        self.should_abort: ShouldAbort = never
        """Whether to abandon a wait; called at least every `_SLICE_SECONDS`."""
        self._ahead = num_workers * prefetch
        self._workers: list[_Worker] = []
        self.method = _resolve(start_method)
        _pools.add(self)
        try:
            with _quiet_start():
                for worker_id in range(num_workers):
                    self._start(worker_id, fetch)
            for worker in self._workers:
                worker.poll.register(worker.channel.fileno(), select.POLLIN)
                for other in self._workers:
                    worker.poll.register(other.process.sentinel, select.POLLIN)
        except BaseException:
            self.close()
            raise

    @property
    def pids(self) -> list[int]:
        """Process ids, in the order of worker ids."""
        return [worker.process.pid or 0 for worker in self._workers]

    def run(
        self, tasks: Iterable[tuple[Any, int, IndexArray]]
    ) -> Generator[tuple[Any, Any], None, None]:
        """Yields (tag, result) for each (tag, epoch, indices), in order.

        Raises:
            LoaderStuckError: a worker did not answer within the deadline.
            DataError: a worker died, or fetching failed in it.
            CutShort: the wait was abandoned.
        """
        source = iter(tasks)
        waiting: deque[tuple[Any, _Worker]] = deque()
        given = 0
        while True:
            while len(waiting) < self._ahead:
                task = next(source, None)
                if task is None:
                    break
                tag, epoch, indices = task
                worker = self._workers[given % len(self._workers)]
                self._give(worker, epoch, indices)
                waiting.append((tag, worker))
                given += 1
            if not waiting:
                return
            tag, worker = waiting.popleft()
            yield tag, self._answer(worker)

    def close(self) -> None:
        """Ends all workers in any state; none is left when it returns."""
        for worker in self._workers:
            # Later workers hold copies of this end: closing it alone would end nothing.
            worker.channel.hang_up()
        limit = time.monotonic() + _GRACE_SECONDS
        for worker in self._workers:
            worker.process.join(max(0.0, limit - time.monotonic()))
        for worker in self._workers:
            if worker.process.is_alive():
                worker.process.kill()
                worker.process.join()
            worker.process.close()
        self._workers.clear()

    def _start(self, worker_id: int, fetch: Fetch) -> None:
        context: Any = multiprocessing.get_context(self.method)
        ours, theirs = Channel.pair()
        process = context.Process(
            target=_serve,
            args=(theirs, fetch, worker_id),
            name=f"surefoot-data-{worker_id}",
            daemon=True,
        )
        try:
            process.start()
        except Exception as error:
            ours.close()
            raise RequestError(
                f"data worker {worker_id} could not be started: {error}",
                where="loader.workers",
                rule=f"with start method {self.method!r} the dataset, its collate function and "
                "the weight function must be importable by name (no lambda or local class)",
                remedy="move them to a module, or set loader.workers to 0",
            ) from error
        finally:
            theirs.close()
        self._workers.append(_Worker(worker_id, process, ours))

    def _give(self, worker: _Worker, epoch: int, indices: IndexArray) -> None:
        worker.asked.append(indices.tolist())
        try:
            worker.channel.send((epoch, indices), self._deadline)
        except TransportTimeout:
            raise self._stuck(worker) from None
        except TransportClosed:
            # Answers given before it died are read first; then its death is reported.
            pass

    def _answer(self, worker: _Worker) -> Any:
        if not worker.started:
            self._receive(worker, self._deadline + _START_SECONDS)
            worker.started = True
        succeeded, result = self._receive(worker, self._deadline)
        worker.asked.popleft()
        if not succeeded:
            raise result
        return result

    def _receive(self, worker: _Worker, seconds: float) -> Any:
        remaining = seconds
        while remaining > 0:
            if self.should_abort():
                raise CutShort
            piece = min(remaining, _SLICE_SECONDS)
            began = time.monotonic()
            ready = {descriptor for descriptor, _ in worker.poll.poll(piece * 1000)}
            if worker.channel.fileno() in ready:
                try:
                    return worker.channel.receive(remaining)
                except TransportTimeout:
                    break
                except TransportClosed:
                    raise self._died(worker) from None
            for other in self._workers:
                if other.process.sentinel in ready:
                    raise self._died(other)
            remaining -= min(time.monotonic() - began, piece)
        raise self._stuck(worker)

    def _stuck(self, worker: _Worker) -> LoaderStuckError:
        ids = worker.asked[0] if worker.asked else []
        what = f"did not answer within {self._deadline:g} s"
        remedy = "raise loader.deadline if these samples are slow; read them directly to see why"
        if not worker.started:
            what = f"did not start within {self._deadline + _START_SECONDS:g} s"
            remedy = "set loader.start_method to spawn, or loader.workers to 0"
        return LoaderStuckError(
            f"{worker} {what}",
            where=f"fetching {_listed(ids)}",
            rule="a worker answers within loader.deadline",
            remedy=remedy,
        )

    def _died(self, worker: _Worker) -> DataError:
        worker.process.join(_GRACE_SECONDS)
        code = worker.process.exitcode
        how = f"ended with exit code {code}"
        remedy = "look for a crash in the dataset's own code; set loader.workers to 0 to see it"
        if code is not None and code < 0:
            how = f"was killed by {_signal_name(-code)}"
            if -code == signal.SIGKILL:
                remedy = "it may have run out of memory: lower loader.workers or loader.prefetch"
        ids = worker.asked[0] if worker.asked else []
        return DataError(
            f"{worker} {how}",
            where=f"fetching {_listed(ids)}",
            rule="a worker runs as long as its loader",
            remedy=remedy,
        )


def _resolve(method: StartMethod) -> str:
    if method != "platform":
        return method
    # On macOS a fork crashes once system frameworks are loaded.
    return "fork" if sys.platform.startswith("linux") else "spawn"


@contextmanager
def _quiet_start() -> Iterator[None]:
    """Blocks signals while workers start, so that none runs a handler of the training."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _OF_THE_TRAINING)
    try:
        with warnings.catch_warnings():
            # Python warns of any fork beside threads. The child takes no lock of theirs: it
            # computes with one torch thread, and a hang would be detected.
            warnings.filterwarnings("ignore", "This process .* is multi-threaded")
            yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _serve(channel: Channel, fetch: Fetch, worker_id: int) -> None:
    """Main function of a worker process."""
    # Ctrl-C reaches the whole process group: the training decides and ends its workers itself.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    # A scheduler that announces the end with SIGUSR1 sends it to every process.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signal.set_wakeup_fd(-1)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _OF_THE_TRAINING)
    torch.set_num_threads(1)
    parent = os.getppid()
    try:
        channel.send(_READY)
        while True:
            task = _next_task(channel, parent)
            if task is None:
                return
            epoch, indices = task
            _reply(channel, fetch, worker_id, epoch, indices)
    except TransportClosed:
        return


def _next_task(channel: Channel, parent: int) -> Any:
    poll = select.poll()
    poll.register(channel.fileno(), select.POLLIN)
    # After the training dies, another worker may still hold a copy of its end.
    while not poll.poll(_ORPHAN_CHECK_SECONDS * 1000):
        if os.getppid() != parent:
            return None
    return channel.receive()


def _reply(channel: Channel, fetch: Fetch, worker_id: int, epoch: int, indices: IndexArray) -> None:
    try:
        answer = (True, fetch(epoch, indices))
    except Exception as error:
        channel.send((False, _portable(error, worker_id)))
        return
    try:
        channel.send(answer)
    except TransportClosed:
        raise
    except Exception as error:
        failure = DataError(
            f"a batch could not be sent from its worker: {type(error).__name__}: {error}",
            where=_listed(indices.tolist()),
            rule="a batch consists of tensors, arrays and plain values",
            remedy="return such values, or set loader.workers to 0",
        )
        channel.send((False, _portable(failure, worker_id)))


def _portable(error: Exception, worker_id: int) -> SurefootError:
    """The error with its traceback as text: frames cannot be sent between processes."""
    if not isinstance(error, SurefootError):
        error = DataError(f"{type(error).__name__}: {error}")
    text = "".join(traceback.format_exception(error))
    error.add_note(f"In data worker {worker_id} (pid {os.getpid()}):\n{text}")
    return error


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _listed(ids: list[int]) -> str:
    if not ids:
        return "no sample yet"
    shown = ", ".join(map(str, ids[:16]))
    return f"sample ids [{shown}{', …' if len(ids) > 16 else ''}]"


@atexit.register
def _close_all() -> None:
    # Runs before the exit handler of multiprocessing, which was registered earlier and would wait
    # for ever for a stopped worker.
    for pool in list(_pools):
        pool.close()
