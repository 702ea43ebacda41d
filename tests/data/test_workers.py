"""Workers that stop, die or fail: named within the deadline, and none is left behind."""

from __future__ import annotations

import contextlib
import faulthandler
import itertools
import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

import surefoot
from surefoot.core.errors import DataError, LoaderStuckError, RequestError
from surefoot.data import workers as workers_module
from surefoot.data.loader import Loader, LoaderSettings
from surefoot.data.order import IN_ORDER, BatchPlan
from surefoot.data.sources.arrays import ArraySource
from surefoot.data.sources.datasets import DatasetSource

Script = Callable[[str], subprocess.Popen[str]]
SOURCE = Path(surefoot.__file__).parents[1]


class Acting:
    """Does something to its own process when sample 5 is read."""

    def __init__(self, action: Callable[[], object]) -> None:
        self.action = action

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 5:
            self.action()
        return torch.tensor(float(index))


def loader_of(action: Callable[[], object], **settings: Any) -> Loader:
    return Loader(
        DatasetSource(Acting(action), name="acting", is_random=False),
        BatchPlan(12, 2, order=IN_ORDER),
        weight=lambda batch: 1.0,
        settings=LoaderSettings(workers=2, **settings),
    )


def processes() -> list[psutil.Process]:
    return [
        process
        for process in psutil.Process().children(recursive=True)
        if process.status() != psutil.STATUS_ZOMBIE
    ]


def test_a_stopped_worker_is_named_within_the_deadline() -> None:
    pids: list[int] = []
    began = time.monotonic()
    with loader_of(lambda: os.kill(os.getpid(), signal.SIGSTOP), deadline_seconds=1.5) as loader:
        with pytest.raises(LoaderStuckError) as caught:
            for _ in loader.iterate():
                assert loader._pool is not None
                pids = loader._pool.pids
        # Batch 2 (samples 4 and 5) is the second task of worker 0.
        assert caught.value.what == f"data worker 0 (pid {pids[0]}) did not answer within 1.5 s"
        assert caught.value.where == "fetching sample ids [4, 5]"
        assert caught.value.remedy
    assert 1.5 <= time.monotonic() - began < 15
    assert processes() == []


def test_a_worker_that_sleeps_is_found_too() -> None:
    with loader_of(lambda: time.sleep(600), deadline_seconds=1.0) as loader:
        with pytest.raises(LoaderStuckError, match="did not answer"):
            list(loader.iterate_once())
        assert processes() == []


def test_a_worker_that_never_starts_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers_module, "_START_SECONDS", 0.5)
    monkeypatch.setattr(workers_module, "_serve", lambda *arguments: time.sleep(600))
    with loader_of(lambda: None, deadline_seconds=0.5) as loader:
        with pytest.raises(LoaderStuckError, match=r"data worker 0 .* did not start within 1 s"):
            next(loader.iterate())
        assert processes() == []


def test_work_that_a_worker_does_not_take_is_not_pressed_on_it() -> None:
    # More indices than a socket holds, and nobody reads them.
    source = ArraySource(torch.zeros(200_000))
    settings = LoaderSettings(workers=1, deadline_seconds=1.0, prefetch=8)
    with Loader(source, BatchPlan(200_000, 100_000), weight=len, settings=settings) as loader:
        list(loader.iterate_once())
        for process in processes():
            process.suspend()
        with pytest.raises(LoaderStuckError, match="did not answer within 1 s"):
            list(loader.iterate_once())
    assert processes() == []


def test_a_slow_worker_within_the_deadline_is_waited_for() -> None:
    with loader_of(lambda: time.sleep(1.5), deadline_seconds=30.0) as loader:
        assert len(list(loader.iterate_once())) == 6


def crash() -> None:
    # The tests' own report of a crash is not wanted here.
    faulthandler.disable()
    os.kill(os.getpid(), signal.SIGSEGV)


@pytest.mark.parametrize(
    ("action", "how"),
    [
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "was killed by SIGKILL"),
        (crash, "was killed by SIGSEGV"),
        (lambda: os._exit(3), "ended with exit code 3"),
    ],
)
def test_a_dead_worker_is_reported_at_once(action: Callable[[], object], how: str) -> None:
    began = time.monotonic()
    with loader_of(action, deadline_seconds=100.0) as loader:
        with pytest.raises(DataError, match=how) as caught:
            list(loader.iterate_once())
        assert not isinstance(caught.value, LoaderStuckError)
        assert caught.value.where == "fetching sample ids [4, 5]"
        assert "data worker 0 (pid " in caught.value.what
    assert time.monotonic() - began < 50
    assert processes() == []


def test_a_worker_killed_from_outside_is_reported() -> None:
    with loader_of(lambda: None, deadline_seconds=100.0) as loader:
        batches = loader.iterate()
        next(batches)
        assert loader._pool is not None
        victim = loader._pool.pids[1]
        os.kill(victim, signal.SIGKILL)
        with pytest.raises(DataError, match=rf"data worker 1 \(pid {victim}\) was killed"):
            for _ in itertools.islice(batches, 100):
                pass
    assert processes() == []


def test_a_worker_stopped_from_outside_is_named() -> None:
    with loader_of(lambda: None, deadline_seconds=1.0) as loader:
        batches = loader.iterate()
        next(batches), next(batches)  # One of each: both have started.
        assert loader._pool is not None
        os.kill(loader._pool.pids[1], signal.SIGSTOP)
        with pytest.raises(LoaderStuckError, match="data worker 1 "):
            for _ in itertools.islice(batches, 100):
                pass
    assert processes() == []


def test_an_error_in_the_training_leaves_no_worker() -> None:
    loader = loader_of(lambda: None)
    with pytest.raises(ZeroDivisionError), contextlib.closing(loader.iterate()) as batches:
        for _ in batches:
            _ = 1 / 0
    assert processes() == []


def test_a_generator_that_is_dropped_leaves_no_worker() -> None:
    loader = loader_of(lambda: None)
    batches = loader.iterate()
    next(batches)
    assert len(processes()) == 2
    del batches
    assert processes() == []


def test_close_ends_stopped_workers() -> None:
    loader = loader_of(lambda: None)
    list(loader.iterate_once())
    for process in processes():
        process.suspend()
    loader.close()
    assert processes() == []
    assert multiprocessing.active_children() == []
    # And the loader can be used again.
    assert len(list(loader.iterate_once())) == 6
    loader.close()


def test_idle_workers_end_by_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    loader = loader_of(lambda: None)
    list(loader.iterate_once())
    monkeypatch.setattr(BaseProcess, "kill", None)
    loader.close()
    assert processes() == []


def test_workers_do_not_mind_ctrl_c() -> None:
    with loader_of(lambda: None) as loader:
        batches = loader.iterate_once()
        next(batches)
        for process in processes():
            process.send_signal(signal.SIGINT)
        assert len(list(batches)) == 5


def test_signals_and_warnings_are_as_before() -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGCHLD)}
    threads = threading.active_count()
    with loader_of(lambda: None) as loader:
        list(loader.iterate_once())
        assert threading.active_count() == threads
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == before
    assert {number: signal.getsignal(number) for number in handlers} == handlers


def test_files_and_memory_are_given_back() -> None:
    data = ArraySource(np.zeros((64, 4096), dtype=np.float32))
    process = psutil.Process()
    descriptors = process.num_fds()
    for _ in range(3):
        with Loader(
            data,
            BatchPlan(64, 8),
            weight=lambda batch: 1.0,
            settings=LoaderSettings(workers=2),
        ) as loader:
            for batch in loader.iterate_once():
                assert batch.data.shape == (8, 4096)
    # A batch holds its memory for as long as it is used, and no longer.
    assert process.num_fds() == descriptors + 1
    del batch
    assert process.num_fds() == descriptors
    if sys.platform.startswith("linux"):
        assert "surefoot-batch" not in Path("/proc/self/maps").read_text()


PRELUDE = """
        import os, signal, sys, time
        import torch
        from surefoot.data.loader import Loader, LoaderSettings
        from surefoot.data.order import BatchPlan
        from surefoot.data.sources.arrays import ArraySource

        def count(batch):
            return float(len(batch))

        def make(**settings):
            return Loader(ArraySource(torch.arange(1000.0)), BatchPlan(1000, 4), weight=count,
                          settings=LoaderSettings(workers=2, **settings))
"""


@pytest.fixture
def run_script() -> Iterator[Callable[[str], subprocess.Popen[str]]]:
    """Starts scripts, each in a process group of its own that does not outlive the test."""
    running: list[subprocess.Popen[str]] = []

    def run(body: str) -> subprocess.Popen[str]:
        script = textwrap.dedent(PRELUDE) + textwrap.dedent(body)
        process = subprocess.Popen(
            [sys.executable, "-W", "error", "-c", script],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(SOURCE)},
            start_new_session=True,
        )
        running.append(process)
        return process

    yield run
    for process in running:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def gone(pids: list[int], seconds: float = 20.0) -> bool:
    limit = time.monotonic() + seconds
    while time.monotonic() < limit:
        if not any(_alive(pid) for pid in pids):
            return True
        time.sleep(0.05)
    return False


def _alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def started(process: subprocess.Popen[str]) -> list[int]:
    assert process.stdout is not None
    return [int(word) for word in process.stdout.readline().split()]


LOOP = """
    # A test run in the background inherits that Ctrl-C is ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    loader = make(deadline_seconds=60.0)
    batches = loader.iterate()
    next(batches)
    print(*loader._pool.pids, flush=True)
    for batch in batches:
        time.sleep(0.01)
"""


def test_ctrl_c_for_the_whole_group_ends_quietly(run_script: Script) -> None:
    process = run_script(LOOP)
    pids = started(process)
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGINT
    assert gone(pids)
    # One traceback, of the training alone.
    assert errors.count("Traceback") == 1 and "KeyboardInterrupt" in errors


def test_workers_end_when_the_training_is_killed(run_script: Script) -> None:
    process = run_script(LOOP)
    pids = started(process)
    process.kill()
    process.communicate(timeout=60)
    assert gone(pids)


def test_an_exit_with_stopped_workers_does_not_hang(run_script: Script) -> None:
    process = run_script("""
        loader = make()
        list(loader.iterate_once())
        print(*loader._pool.pids, flush=True)
        for pid in loader._pool.pids:
            os.kill(pid, signal.SIGSTOP)
    """)
    pids = started(process)
    _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (0, "")
    assert gone(pids)


def test_two_loaders_end_with_their_training(run_script: Script) -> None:
    process = run_script(
        """
        first, second = make(), make()
        one, two = first.iterate(), second.iterate()
        next(one), next(two)
        print(*first._pool.pids, *second._pool.pids, flush=True)
        time.sleep(600)
    """,
    )
    pids = started(process)
    assert len(pids) == 4
    process.kill()
    process.communicate(timeout=60)
    assert gone(pids)


@pytest.mark.slow
def test_workers_started_afresh_give_the_same_batches(tmp_path: Path) -> None:
    # Such workers import the script again: it must be a file.
    body = """
        if __name__ == "__main__":
            with make(start_method="spawn") as loader, make(start_method="fork") as other:
                pairs = zip(loader.iterate_once(), other.iterate_once(), strict=True)
                print(sum(a.ids == b.ids and torch.equal(a.data, b.data) for a, b in pairs))
    """
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(PRELUDE) + textwrap.dedent(body))
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    done = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, env=environment, timeout=200
    )
    assert (done.stdout, done.stderr) == ("250\n", "")


def test_what_cannot_be_sent_to_a_spawned_worker_is_refused() -> None:
    with (
        loader_of(lambda: None, start_method="spawn") as loader,
        pytest.raises(RequestError, match="could not be started") as caught,
    ):
        next(loader.iterate())
    assert "importable by name" in caught.value.rule
