"""Starts the ranks of one machine with torch's elastic agent, and ends them all.

A failed rank ends the launch; nothing is restarted. Signals are forwarded to the ranks, which save
and exit with their own code. Ranks that do not exit after a failure are killed earlier than torch
would. Knows nothing of what a rank does.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import FrameType
from typing import Any, Final

import torch.distributed as dist
from torch.distributed.elastic.agent.server.api import (
    RunResult,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.api import SubprocessContext
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from surefoot.core.errors import EXIT_STOPPED, RankError
from surefoot.parallel.join import RUN_ID_PREFIX, launchers_store
from surefoot.parallel.lookout import (
    CHECK_EVERY_SECONDS,
    CHECKS_PER_DEADLINE,
    MAX_STACKS_WAIT_SECONDS,
    RankHeartbeat,
    Silence,
    all_have_written,
    ask_for_stacks,
    read_signs,
    silent_failure,
)
from surefoot.parallel.lost import LAUNCHER, Failure, How, claim, first_failure

FORWARDED_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
SIGNAL_EXIT_CODE_BASE = 128
MAX_EXIT_SECONDS = 5.0
"""Time the other ranks have to exit after the first failure; torch would wait 30 s."""
MAX_EXIT_AFTER_HANG_SECONDS = 2.0
"""The same if a rank hangs, after it has been asked for its stacks."""
SAME_REQUEST_SECONDS = 0.5
"""Signals within this time of the first one count as the same request."""
MAX_KILL_WAIT_SECONDS = 1.0
"""Longest wait for the system to remove killed processes."""
TICK_SECONDS = 0.1
REQUESTED_EXIT_CODES: Final = (EXIT_STOPPED, -signal.SIGTERM)
"""Exit codes of ranks that were asked to leave."""


@dataclass(frozen=True)
class Launched:
    """How a launch ended."""

    exit_code: int
    """Exit code of the rank that ended the launch; 0 if all succeeded."""
    rank: int | None = None
    """The rank that ended the launch."""
    killed_by: signal.Signals | None = None
    """The signal that ended that rank, if it did not exit by itself."""
    failure: Failure | None = None
    """The failure that the ranks, or the launcher, have reported."""


def launch(arguments: Sequence[str], num_ranks: int, deadline_seconds: float) -> Launched:
    """Runs `python -m ARGUMENTS` once per rank and waits for all.

    Args:
        deadline_seconds: a rank without a heartbeat for this long counts as hanging.

    Raises:
        RankError: the ranks could not be started.
    """
    for name in ("torch.distributed.elastic", "torch.distributed.launcher"):
        # Errors are printed by the rank that failed, or by us.
        logging.getLogger(name).setLevel(logging.CRITICAL + 1)
    if "OMP_NUM_THREADS" not in os.environ:
        # The ranks share the cores of the machine.
        threads = max(1, (os.cpu_count() or 1) // num_ranks)
        os.environ["OMP_NUM_THREADS"] = str(threads)
    with tempfile.TemporaryDirectory(prefix="surefoot-launch-") as logs:
        return _Launch(list(arguments), num_ranks, logs, deadline_seconds).run()


class _Agent(LocalElasticAgent):
    """Torch's agent; reports who has failed before it asks the others to leave.

    The others then know why, and the rank that failed by itself is known here.
    """

    store: dist.Store | None = None
    """The current agent, once ranks are being started."""
    ended_first: Mapping[int, int] = {}
    """Exit codes of ranks that had exited, at least one with an error, before any was asked to."""
    looks_since: float | None = None
    """Start of the current check of the ranks; a check takes long only after a failure, while
    torch waits for the other ranks."""

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        assert worker_group.master_addr is not None and worker_group.master_port is not None
        self.store = launchers_store(worker_group.master_addr, worker_group.master_port)
        return super()._start_workers(worker_group)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        ended = self._exit_codes()
        num_ranks = len(worker_group.workers)
        if len(ended) < num_ranks and not any(ended.values()):
            return RunResult(state=WorkerState.HEALTHY)
        if any(ended.values()) and not self.ended_first:
            self.ended_first = ended
            self._say_who()
        self.looks_since = time.monotonic()
        try:
            result: RunResult = super()._monitor_workers(worker_group)
            return result
        finally:
            self.looks_since = None

    def _exit_codes(self) -> dict[int, int]:
        """Of the ranks that have exited."""
        context = self._pcontext
        assert isinstance(context, SubprocessContext)
        codes = {rank: started.proc.poll() for rank, started in context.subprocess_handlers.items()}
        return {rank: code for rank, code in codes.items() if code is not None}

    def _say_who(self) -> None:
        assert self.store is not None
        rank = loudest(self.ended_first)
        code = self.ended_first[rank]
        with suppress(dist.DistError, RuntimeError):
            sign = read_signs(self.store, [rank]).get(rank)
            # A rank that ran to the end of its process has reported its own error.
            spoke = code > 0 and (sign is None or sign.left)
            what = "" if spoke or code < 0 else f"its process has ended with code {code}"
            claim(self.store, Failure(rank, How.FAILED if spoke else How.GONE, LAUNCHER, what))


class _Launch:
    """One launch. The agent runs on a second thread: on the main thread it would end the ranks at
    the first signal, before they can save."""

    def __init__(
        self, arguments: list[str], num_ranks: int, logs: str, deadline_seconds: float
    ) -> None:
        meeting = RendezvousParameters(
            backend="c10d",
            endpoint="127.0.0.1:0",
            run_id=RUN_ID_PREFIX + uuid.uuid4().hex,
            min_nodes=1,
            max_nodes=1,
            local_addr="127.0.0.1",
        )
        self._spec = WorkerSpec(
            role="rank",
            local_world_size=num_ranks,
            entrypoint=sys.executable,
            args=("-m", *arguments),
            rdzv_handler=get_rendezvous_handler(meeting),
            max_restarts=0,
            monitor_interval=TICK_SECONDS,
            local_addr="127.0.0.1",
        )
        self._agent = _Agent(self._spec, DefaultLogsSpecs(log_dir=logs))
        self._deadline = deadline_seconds
        self._result: RunResult | None = None
        self._error: BaseException | None = None
        self._asked: list[int] = []
        """Signals that have not been forwarded yet."""
        self._first_asked: float | None = None
        self._second: tuple[int, float] | None = None
        """The signal that asked a second time, and when."""
        self._silence = Silence()
        self._hangs: tuple[int, float] | None = None
        """The rank found hanging by this process, and when."""
        self._asked_for_stacks: float | None = None
        """When it was found."""
        self._looked = time.monotonic()

    def run(self) -> Launched:
        thread = threading.Thread(target=self._run_agent, name="surefoot-launch", daemon=True)
        with _calling(self._pass_on):
            thread.start()
            while thread.is_alive():
                # With a timeout: Python's signal handlers run only when the main thread wakes.
                thread.join(timeout=TICK_SECONDS)
                self._tick()
        until = time.monotonic() + MAX_KILL_WAIT_SECONDS
        # Processes that ranks have started, such as data workers, are in their process groups.
        while self._kill() and time.monotonic() < until:
            time.sleep(0.01)
        return self._told()

    def _run_agent(self) -> None:
        try:
            self._result = self._agent.run()
            self._spec.rdzv_handler.shutdown()
        except BaseException as error:
            self._error = error

    def _pids(self) -> list[int]:
        """Of the ranks, once started; each leads a process group."""
        workers = self._agent.get_worker_group().workers
        return [worker.id for worker in workers if isinstance(worker.id, int)]

    def _pass_on(self, number: int) -> None:
        now = time.monotonic()
        self._first_asked = self._first_asked or now
        if now - self._first_asked > SAME_REQUEST_SECONDS and self._second is None:
            self._second = number, now
        self._asked.append(number)
        self._deliver()

    def _deliver(self) -> None:
        pids = self._pids()
        while pids and self._asked:
            number = self._asked.pop(0)
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, number)

    def _tick(self) -> None:
        if self._asked:
            self._deliver()
        now = time.monotonic()
        if self._is_overdue(now):
            self._kill()
        seconds = now - self._looked
        if self._pids() and seconds > min(
            CHECK_EVERY_SECONDS, self._deadline / CHECKS_PER_DEADLINE
        ):
            self._looked = now
            # Time in which this process itself was stopped is not counted.
            with suppress(dist.DistError, RuntimeError):
                self._look(min(seconds, 2 * CHECK_EVERY_SECONDS))
        if self._hangs is not None and self._asked_for_stacks is None:
            with suppress(dist.DistError, RuntimeError):
                self._ask_for_stacks(*self._hangs, now)

    def _is_overdue(self, now: float) -> bool:
        """Whether ranks are still running that should have exited by now."""
        looks_since = self._agent.looks_since
        hang_since = self._asked_for_stacks
        if looks_since is not None and now - looks_since > MAX_EXIT_AFTER_HANG_SECONDS:
            said = self._said()
            if said is not None and said.how is How.HANGS:
                hang_since = hang_since or looks_since
        asked_again = self._second[1] if self._second is not None else None
        return (
            (hang_since is not None and now - hang_since > MAX_EXIT_AFTER_HANG_SECONDS)
            or (looks_since is not None and now - looks_since > MAX_EXIT_SECONDS)
            or (asked_again is not None and now - asked_again > MAX_EXIT_SECONDS)
        )

    def _said(self) -> Failure | None:
        with suppress(dist.DistError, RuntimeError):
            return None if self._agent.store is None else first_failure(self._agent.store)
        return None

    def _look(self, seconds: float) -> None:
        """Checks for a rank that hangs before or after the others joined."""
        store, ranks = self._agent.store, range(self._spec.local_world_size)
        assert store is not None
        signs = read_signs(store, ranks)
        # A rank may start slowly, but must not be stopped.
        starting = {r: RankHeartbeat.near(p) for r, p in enumerate(self._pids()) if r not in signs}
        signs |= {rank: sign for rank, sign in starting.items() if sign.is_stopped}
        signs = {rank: sign for rank, sign in signs.items() if not _has_ended(sign.pid)}
        rank, silent = self._silence.longest(signs, seconds)
        if silent > self._deadline and self._hangs is None:
            self._hangs = rank, time.monotonic()
            claim(store, silent_failure(rank, signs[rank], silent, LAUNCHER, True))

    def _ask_for_stacks(self, rank: int, since: float, now: float) -> None:
        """Asks last of all: the request wakes a stopped process, and the others may then end."""
        store, ranks = self._agent.store, range(self._spec.local_world_size)
        assert store is not None
        if now - since > MAX_STACKS_WAIT_SECONDS or all_have_written(store, ranks, rank):
            self._asked_for_stacks = now
            ask_for_stacks(store, rank)

    def _kill(self) -> bool:
        """Kills all ranks and their process groups; returns whether any process was left."""
        found = False
        for pid in self._pids():
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)
                found = True
        return found

    def _told(self) -> Launched:
        if self._error is not None or self._result is None:
            raise RankError(
                f"the ranks could not be started: {self._error}",
                where="launch",
                rule="torch's launcher starts the ranks of this machine",
                remedy="check that this machine can open ports on 127.0.0.1",
            ) from self._error
        said = self._said()
        codes = {rank: failure.exitcode for rank, failure in self._result.failures.items()}
        if not codes:
            return Launched(0)
        rank, code = who_ended_it(self._agent.ended_first or codes, codes, said)
        if code >= 0:
            return Launched(code, rank, failure=said)
        if self._second is not None and -code == signal.SIGKILL:
            # Killed by us: they did not exit after two requests.
            return Launched(SIGNAL_EXIT_CODE_BASE + self._second[0], rank)
        return Launched(SIGNAL_EXIT_CODE_BASE - code, rank, signal.Signals(-code), said)


def loudest(codes: Mapping[int, int]) -> int:
    """The rank with the worst end: a signal before an error code, and both before a requested exit.

    Ranks also exit with an error code because another one was killed.

    >>> loudest({0: 3, 2: -9})
    2
    >>> loudest({0: 75, 1: 0, 2: 3})
    2
    """

    def calm(rank: int) -> int:
        code = codes[rank]
        return 3 if code == 0 else 2 if code in REQUESTED_EXIT_CODES else 1 if code > 0 else 0

    return min(codes, key=calm)


def who_ended_it(
    first: Mapping[int, int], last: Mapping[int, int], said: Failure | None
) -> tuple[int, int]:
    """The rank that ended a launch, and the exit code that counts.

    Args:
        first: exit codes of the ranks that had exited before the agent asked the others to leave.
        last: exit codes of all ranks that did not succeed.
        said: the failure that the ranks, or the launcher, have reported.
    """
    if said is not None and first.get(said.rank, 0) != 0:
        return said.rank, first[said.rank]
    if said is not None and said.how is How.FAILED:
        # It was still leaving when a rank that waited for it exited.
        code = last.get(said.rank, 0)
        if code > 0 and code not in REQUESTED_EXIT_CODES:
            return said.rank, code
    rank = loudest(first)
    return rank, first[rank]


def _has_ended(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


@contextmanager
def _calling(pass_on: Callable[[int], None]) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handle(number: int, frame: FrameType | None) -> None:
        pass_on(number)

    before = [(number, signal.signal(number, handle)) for number in FORWARDED_SIGNALS]
    try:
        yield
    finally:
        for number, handler in before:
            signal.signal(number, handler)


def end_with_launcher() -> None:
    """In a rank: exit when the launcher is gone, so that no rank is left behind."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            left.wait(1.0)
        os._exit(SIGNAL_EXIT_CODE_BASE + signal.SIGTERM)

    left = threading.Event()
    threading.Thread(target=watch, name="surefoot-parent", daemon=True).start()
