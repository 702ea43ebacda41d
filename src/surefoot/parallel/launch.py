"""Starts the ranks of one machine by torch's own elastic agent, and ends them all.

A failed rank ends the launch; nothing is restarted. Signals are passed on to the ranks, which save
and leave with their own exit code. What a rank does is not known here.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import FrameType

import psutil
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, launch_agent

from surefoot.core.errors import RankError

PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
SHELL_CODE_OF_SIGNAL = 128


@dataclass(frozen=True)
class Launched:
    """How a launch ended."""

    exit_code: int
    """That of the rank that ended first with one above zero; 0 where all are well."""
    rank: int | None = None
    """That rank."""
    killed_by: str = ""
    """The signal that ended it, where it did not leave by itself."""


def launch(arguments: Sequence[str], num_ranks: int) -> Launched:
    """Runs `python -m ARGUMENTS` once for each rank and waits for all.

    Raises:
        RankError: the ranks could not be started.
    """
    for name in ("torch.distributed.elastic", "torch.distributed.launcher"):
        # What it has to say is said by the rank that failed, or by us.
        logging.getLogger(name).setLevel(logging.CRITICAL + 1)
    if "OMP_NUM_THREADS" not in os.environ:
        # Ranks share the cores of the machine.
        threads = max(1, (os.cpu_count() or 1) // num_ranks)
        os.environ["OMP_NUM_THREADS"] = str(threads)
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_ranks,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        local_addr="127.0.0.1",
        max_restarts=0,
        monitor_interval=0.1,
    )
    return _Launch(config, list(arguments)).run()


class _Launch:
    """One agent. It runs on a thread of its own: on the main thread it would end the ranks at the
    first signal, and they shall save first."""

    def __init__(self, config: LaunchConfig, arguments: list[str]) -> None:
        self._config = config
        self._arguments = arguments
        self._error: BaseException | None = None

    def run(self) -> Launched:
        thread = threading.Thread(target=self._agent, name="surefoot-launch", daemon=True)
        with _passing_signals_on():
            thread.start()
            while thread.is_alive():
                # Not without an end: a handler of Python's waits for the main thread to wake.
                thread.join(timeout=0.2)
        return self._told()

    def _agent(self) -> None:
        try:
            launch_agent(self._config, sys.executable, ["-m", *self._arguments])
        except BaseException as error:
            self._error = error

    def _told(self) -> Launched:
        if self._error is None:
            return Launched(0)
        if not isinstance(self._error, ChildFailedError):
            raise RankError(
                f"the ranks could not be started: {self._error}",
                where="launch",
                rule="torch's launcher starts the ranks of this machine",
                remedy="see whether this machine may open ports on 127.0.0.1",
            ) from self._error
        rank, first = self._error.get_first_failure()
        code = first.exitcode
        if code >= 0:
            return Launched(code, rank)
        return Launched(SHELL_CODE_OF_SIGNAL - code, rank, signal.Signals(-code).name)


@contextmanager
def _passing_signals_on() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def pass_on(number: int, frame: FrameType | None) -> None:
        for child in psutil.Process().children():
            with suppress(psutil.Error):
                child.send_signal(number)

    before = [(number, signal.signal(number, pass_on)) for number in PASSED_ON]
    try:
        yield
    finally:
        for number, handler in before:
            signal.signal(number, handler)


def end_with_launcher() -> None:
    """In a rank: leave when the launcher is gone, so that no rank is ever left behind."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            left.wait(1.0)
        os._exit(SHELL_CODE_OF_SIGNAL + signal.SIGTERM)

    left = threading.Event()
    threading.Thread(target=watch, name="surefoot-parent", daemon=True).start()
