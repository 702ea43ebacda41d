"""Launches of several ranks by the command, forked from a process that has loaded all, for faults.

Launcher, agent, signals and ranks are those of the command; only how a rank's process comes to be
is different: it is forked and told to forget what it has, where the command starts an interpreter.
"""

from __future__ import annotations

import atexit
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import psutil
import torch
from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

from faults.trials import STARTED_NEVER, counting, newest_hash, rows, write_recipe
from surefoot.cli import main as command
from surefoot.core.errors import EXIT_DONE
from surefoot.data.fetch import Fetcher
from surefoot.engine import interrupt
from surefoot.parallel import collectives, ranks
from surefoot.parallel.collectives import HostSums
from surefoot.tasks.metrics import MetricTotals
from surefoot.verify import processes

# What a launch loads late, loaded once for all.
processes.PRELOADED = (
    *processes.PRELOADED,
    "faults.launches",
    "surefoot.parallel.launch",
    "surefoot.report.run_page",
    "surefoot.judge.contract",
    "sklearn.datasets",
)
LISTENS = interrupt.stopped_before_begin
LAUNCHER, ALL = "the launcher", "all"


@dataclass(frozen=True)
class Fault:
    """A signal, sent by one rank (or a clock beside the launcher) at one moment."""

    moment: str
    """`clock`: so many seconds after the launch; else a place in a rank, of `MOMENTS`."""
    amount: float
    """Seconds, or at so many calls."""
    target: str = LAUNCHER
    """`the launcher`, `all` (as a scheduler does), or a rank."""
    signal: int = signal.SIGTERM
    rank: int = 0
    """Where the moment is looked for."""
    again_after: float = 0.0
    """A second signal so many seconds later, where above 0."""
    act: str = "signal"
    """`signal`; else what the rank does itself for ever: `spin` in Python, or `hold` its lock."""


MOMENTS: Mapping[str, int] = {
    "update": 23,
    "sum": 80,
    "evaluation": 15,
    "fsync": 40,
    "meeting": 46,
    "sample": 50,
}
"""Calls within which a fault is drawn, for a run of `RECIPES`."""


def draw_stop(moments: random.Random, seconds: float) -> Fault:
    """A random request to stop."""
    moment = moments.choice(["clock", "clock", *MOMENTS])
    amount = moments.uniform(0.0, seconds) if moment == "clock" else 0.0
    if not amount:
        amount = moments.randrange(1, MOMENTS.get(moment, 1) + 1)
    target = moments.choice([LAUNCHER, LAUNCHER, ALL, "0", "1"])
    number = moments.choice([signal.SIGTERM, signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
    return Fault(moment, amount, target, number, moments.randrange(2))


def draw_loss(moments: random.Random, num_ranks: int, act: str, number: int = 0) -> Fault:
    """A random rank that dies (by a signal) or hangs."""
    moment = moments.choice([*MOMENTS])
    rank = moments.randrange(num_ranks)
    amount = moments.randrange(1, 1 + MOMENTS[moment])
    return Fault(moment, amount, str(rank), number, rank, act=act)


class ForkedRank:
    """What the agent needs of a `subprocess.Popen`, for a rank that is forked."""

    faults: ClassVar[tuple[Fault, ...]] = ()
    pids: ClassVar[Path]
    """Where the process ids of all ranks are kept: each leads a session of its own."""
    fired: ClassVar[Path]
    """Where the moment of a fault is kept."""

    def __init__(
        self, args: Any, env: Mapping[str, str], stdout: Any, stderr: Any, start_new_session: bool
    ) -> None:
        assert args[1:3] == ("-m", "surefoot") and start_new_session and stdout is stderr is None
        self.returncode: int | None = None
        self._lock = threading.Lock()
        self.pid = os.fork()
        if self.pid == 0:
            code = 1
            try:
                code = _be_rank(list(args[3:]), env, self.faults)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        # `subprocess.Popen` returns when the new process leads its group, and not before.
        while self.poll() is None and os.getpgid(self.pid) != self.pid:
            time.sleep(0.001)
        with self.pids.open("a") as file:
            file.write(f"{self.pid}\n")

    def poll(self) -> int | None:
        with self._lock:
            if self.returncode is None:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                if pid:
                    self.returncode = os.waitstatus_to_exitcode(status)
            return self.returncode

    def wait(self, timeout: float) -> int:
        until = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > until:
                raise subprocess.TimeoutExpired("rank", timeout)
            time.sleep(0.01)
        return code


def _be_rank(arguments: list[str], env: Mapping[str, str], faults: tuple[Fault, ...]) -> int:
    # What a new interpreter would not have from its parent.
    os.setsid()
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    os.closerange(3, 1024)
    os.environ.clear()
    os.environ.update(env)
    atexit._clear()
    interrupt.stopped_before_begin = LISTENS
    for fault in faults:
        if os.environ["RANK"] == str(fault.rank):
            _arm(fault)
    code = command.invoke(arguments)
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    return code


def _arm(fault: Fault) -> None:
    # The moment may come in a data worker, whose parent is the rank.
    launcher = os.getppid()

    def fire() -> None:
        if fault.act == "signal":
            send(fault, launcher)
            return
        write_time()
        while fault.act == "spin":
            pass
        # Takes longer than any run, and never gives the interpreter's lock away.
        re.match("(a+)+b", "a" * 60)

    fire_at = counting(fire, fault.amount)
    if fault.moment == "update":
        HostSums.asked_to_stop = fire_at(HostSums.asked_to_stop)  # type: ignore[method-assign]
    elif fault.moment == "sum":
        collectives.dist.all_reduce = fire_at(collectives.dist.all_reduce)
    elif fault.moment == "evaluation":
        MetricTotals.add = fire_at(MetricTotals.add)  # type: ignore[method-assign]
    elif fault.moment == "fsync":
        os.fsync = fire_at(os.fsync)
    elif fault.moment == "meeting":
        gather = ranks.StoreRanks.gather
        ranks.StoreRanks.gather = fire_at(gather)  # type: ignore[method-assign]
    elif fault.moment == "sample":
        Fetcher.__call__ = fire_at(Fetcher.__call__)  # type: ignore[method-assign]


def send(fault: Fault, launcher: int) -> None:
    """Sends the signal, and the second one, from a thread, a while after."""
    _signal(fault, launcher)
    if fault.again_after:
        again = threading.Timer(fault.again_after, _signal, (fault, launcher))
        again.daemon = True
        again.start()


def write_time() -> None:
    """Leaves the moment of a fault, on the clock that all processes share."""
    ForkedRank.fired.write_text(repr(time.monotonic()))


def _signal(fault: Fault, launcher: int) -> None:
    write_time()
    with suppress(psutil.Error):
        started = ranks_of(launcher)
        pids = {LAUNCHER: [launcher], ALL: [launcher, *started.values()]}.get(fault.target)
        if pids is None:
            pids = [started[int(fault.target)]] if int(fault.target) in started else []
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, fault.signal)


def ranks_of(launcher: int) -> dict[int, int]:
    """Process ids of the ranks that a launcher has started, in their order."""
    children = psutil.Process(launcher).children()
    return dict(enumerate(sorted(process.pid for process in children)))


def launch(arguments: list[str], faults: tuple[Fault, ...], output: str) -> None:
    """Body of a process: the command with its launcher."""
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["XDG_CACHE_HOME"] = str(Path(output).parent / "cache")
    subprocess_handler.Popen = ForkedRank  # type: ignore[misc]
    ForkedRank.faults = faults
    ForkedRank.pids = Path(output).with_suffix(".pids")
    ForkedRank.fired = Path(output).with_suffix(".fired")
    timers = [
        threading.Timer(fault.amount, send, (fault, os.getpid()))
        for fault in faults
        if fault.moment == "clock"
    ]
    _start_when_the_command_listens(timers)
    raise SystemExit(command.invoke(arguments))


def _start_when_the_command_listens(timers: list[threading.Timer]) -> None:
    @contextmanager
    def begun() -> Iterator[None]:
        with LISTENS():
            for timer in timers:
                timer.daemon = True
                timer.start()
            yield

    interrupt.stopped_before_begin = begun


class Slow(torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """To a worker, its seventh sample comes only once a file is gone; SIGTERM comes at once, to who
    stands in the file."""

    def __init__(self, file: str) -> None:
        self.file = Path(file)
        self.rank = os.getpid()

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if index == 7 and self.file.exists() and os.getpid() != self.rank:
            # By then the other rank waits for this one, in foreign code, and runs no handler.
            time.sleep(1.5)
            send(Fault("sample", 1, self.file.read_text()), psutil.Process(self.rank).ppid())
            while self.file.exists():
                time.sleep(0.1)
        inputs = torch.randn(3, generator=torch.Generator().manual_seed(index))
        return inputs, inputs.sum().reshape(1)


@dataclass
class Launch:
    """How a launch ended."""

    code: int
    seconds: float
    since_fault: float | None
    """Seconds from the fault to its end; None where there was none."""
    left: list[int] = field(default_factory=list)
    """Processes that it left behind."""


def train(
    arguments: list[str],
    output: Path,
    fault: Fault | tuple[Fault, ...] | None = None,
    num_ranks: int = 2,
) -> Launch:
    """`surefoot train --nproc N` with these arguments."""
    fired = output.with_suffix(".fired")
    fired.unlink(missing_ok=True)
    began = time.monotonic()
    told = ["train", *arguments, "--nproc", str(num_ranks)]
    faults = fault if isinstance(fault, tuple) else () if fault is None else (fault,)
    with processes.child(launch, told, faults, str(output)) as process:
        process.join(STARTED_NEVER)
        assert process.exitcode is not None, f"hangs: {arguments} {fault}\n{output.read_text()}"
        ended = time.monotonic()
        since = ended - float(fired.read_text()) if fired.exists() else None
        return Launch(process.exitcode, ended - began, since, left_behind(output))


@dataclass(frozen=True)
class Whole:
    """A launch that nothing befell."""

    recipe: str
    num_ranks: int
    seconds: float
    rows: list[dict[str, Any]]
    hash: str

    @classmethod
    def of(cls, folder: Path, num_ranks: int, name: str = "mlp") -> Whole:
        """Trains one of `RECIPES` in `folder`."""
        recipe, output = str(write_recipe(folder, name)), folder / "output.txt"
        ended = train([recipe, "--runs", str(folder / "whole")], output, None, num_ranks)
        assert ended.code == EXIT_DONE, output.read_text()
        (run,) = (folder / "whole").iterdir()
        return cls(recipe, num_ranks, ended.seconds, rows(run), newest_hash(run))


def by_command(runs: Path, arguments: list[str], output: Path, fault: Fault | None) -> Launch:
    """The same with nothing forked: an interpreter for the launcher, and one for each rank.

    The moment of the fault is so many rows in the log of the one run below `runs`.
    """
    ForkedRank.fired, pids = output.with_suffix(".fired"), output.with_suffix(".pids")
    ForkedRank.fired.unlink(missing_ok=True)
    words = [sys.executable, "-m", "surefoot", "train", *arguments, "--nproc", "2"]
    began = time.monotonic()
    with output.open("a") as file, subprocess.Popen(words, stdout=file, stderr=file) as process:
        try:
            while fault is not None and process.poll() is None:
                if sum(log.read_bytes().count(b"\n") for log in runs.glob("*/metrics.jsonl")) >= (
                    fault.amount
                ):
                    pids.write_text("\n".join(map(str, ranks_of(process.pid).values())))
                    send(fault, process.pid)
                    break
                time.sleep(0.01)
            code = process.wait(STARTED_NEVER)
        finally:
            process.kill()
    ended = time.monotonic()
    since = ended - float(ForkedRank.fired.read_text()) if ForkedRank.fired.exists() else None
    return Launch(code, ended - began, since, left_behind(output))


def left_behind(output: Path) -> list[int]:
    """Living processes of the ranks of launches with that output, and forgets them."""
    pids = output.with_suffix(".pids")
    if not pids.exists():
        return []
    sessions = {int(line) for line in pids.read_text().split()}
    pids.unlink()
    left = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, ProcessLookupError):
            is_theirs = os.getsid(process.pid) in sessions
            if is_theirs and process.status() != psutil.STATUS_ZOMBIE:
                left.append(process.pid)
    return left
