"""Hang detection: if a run makes no progress, the stacks of all threads are written to a file.

The interpreter's own watchdog writes them without taking a Python lock: also where foreign code
never returns. Ends nothing and changes nothing; another process may ask for a dump with SIGUSR2.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from math import inf
from pathlib import Path
from types import TracebackType
from typing import TextIO, TypeVar

Item = TypeVar("Item")
CHECKS_PER_DEADLINE = 4
ASK_SIGNAL = signal.SIGUSR2


def stacks_path(artifacts: Path, rank: int = 0) -> Path:
    """The file with the stacks of one rank."""
    return artifacts / f"stacks-rank-{rank}.txt"


class HangWatch:
    """A context manager that detects missing progress.

    Beats re-arm the interpreter's watchdog timer; it fires if none come.

    Args:
        path: file for the stacks; exists only once it has content.
        deadline_seconds: longest time without a beat.
        tell: called with a message from a separate thread, once per silence.
        reading: names the samples that this process reads at this moment; empty for none.
        read_deadline_seconds: longest time for one of them.
    """

    def __init__(
        self,
        path: Path,
        deadline_seconds: float,
        tell: Callable[[str], None] = lambda text: None,
        reading: Callable[[], str] = lambda: "",
        read_deadline_seconds: float = inf,
    ) -> None:
        self.path = path
        self._deadline = deadline_seconds
        self._tell = tell
        self._reading = reading
        self._read_deadline = read_deadline_seconds
        self._beats = 0
        self._doing = "starting"
        self._done = threading.Event()
        self._file: TextIO | None = None
        self._thread: threading.Thread | None = None
        self._asked_before = False

    def beat(self, doing: str) -> None:
        """Reports progress, and what is being done. Nearly free."""
        self._beats += 1
        self._doing = doing

    @property
    def doing(self) -> str:
        """The argument of the last beat."""
        return self._doing

    def dump(self) -> None:
        """Writes the stacks of all threads."""
        if self._file is not None and not self._file.closed:
            faulthandler.dump_traceback(self._file, all_threads=True)

    def beating(self, items: Iterator[Item], doing: str) -> Iterator[Item]:
        """Yields the items, with a beat for each."""
        for item in items:
            self.beat(doing)
            yield item

    def __enter__(self) -> HangWatch:
        self._file = self.path.open("a", encoding="utf-8")
        self._wind_up()
        if threading.current_thread() is threading.main_thread():
            faulthandler.register(ASK_SIGNAL, self._file, all_threads=True)
            self._asked_before = True
        self._thread = threading.Thread(target=self._look, name="surefoot-watch", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._done.set()
        if self._thread is not None:
            self._thread.join()
        faulthandler.cancel_dump_traceback_later()
        if self._asked_before:
            faulthandler.unregister(ASK_SIGNAL)
        if self._file is not None:
            self._file.close()
        if self.path.exists() and self.path.stat().st_size == 0:
            self.path.unlink()

    def _wind_up(self) -> None:
        assert self._file is not None
        faulthandler.dump_traceback_later(self._deadline, file=self._file)

    def _look(self) -> None:
        seen, heard, told = -1, time.monotonic(), False
        read, began = "", heard
        pause = min(self._deadline, self._read_deadline) / CHECKS_PER_DEADLINE
        while not self._done.wait(pause):
            now, reading = time.monotonic(), self._reading()
            if self._beats != seen or reading != read:
                began, read = now, reading
            if self._beats != seen:
                seen, heard, told = self._beats, now, False
                self._wind_up()
            elif read and now - began > self._read_deadline and not told:
                told = True
                self.dump()
                self._tell(f"reading {read} has not ended for {now - began:.0f} s; {self._where()}")
            elif now - heard > self._deadline and not told:
                told = True
                self._tell(
                    f"no progress for {now - heard:.0f} s, last: {self._doing}; {self._where()}"
                )

    def _where(self) -> str:
        place = f"{self.path.parent.name}/{self.path.name}"
        return f"the stacks of process {os.getpid()} stand in {place}"


FLIGHT_RECORDER = {
    "TORCH_FR_BUFFER_SIZE": "2000",
    "TORCH_NCCL_TRACE_BUFFER_SIZE": "2000",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
}
"""Torch's environment variables for NCCL's flight recorder, to be set before a group is made. A
collective that times out then dumps the last calls of each rank; comparing their sequence numbers
names the missing rank. Torch has renamed some of them: both names are set."""


def flight_recorder_files(folder: Path) -> dict[str, str]:
    """Files that the recorder of each rank dumps to; torch reads the variable when it writes."""
    file = str(folder / "nccl-rank-")
    return {"TORCH_FR_DUMP_TEMP_FILE": file, "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": file}


def set_where_free(variables: Mapping[str, str]) -> None:
    """Sets the variables that the user has not set."""
    for name, value in variables.items():
        os.environ.setdefault(name, value)
