"""A run that is silent leaves its stacks; one that goes on leaves nothing."""

from __future__ import annotations

import faulthandler
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from surefoot.observe.watch import (
    ASK_SIGNAL,
    FLIGHT_RECORDER,
    HangWatch,
    flight_recorder_files,
    set_where_free,
    stacks_path,
)

STUCK = """
import hashlib, sys
from pathlib import Path
from surefoot.observe.watch import HangWatch

def stuck_in_foreign_code():
    hashlib.pbkdf2_hmac("sha256", b"", b"", 2**31 - 1)

with HangWatch(Path(sys.argv[1]), 0.3) as watch:
    watch.beat("an update")
    print("ready", flush=True)
    stuck_in_foreign_code()
"""


def wait_for(path: Path, text: str, seconds: float = 20.0) -> str:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        found = path.read_text() if path.exists() else ""
        if text in found:
            return found
        time.sleep(0.02)
    raise AssertionError(f"{text!r} never came")


def test_a_main_thread_that_hangs_leaves_its_stack(tmp_path: Path) -> None:
    path = tmp_path / "stacks.txt"
    process = subprocess.Popen([sys.executable, "-c", STUCK, str(path)])
    try:
        assert "Timeout" in wait_for(path, "stuck_in_foreign_code")
        before = path.stat().st_size
        os.kill(process.pid, ASK_SIGNAL)
        until = time.monotonic() + 20
        while path.stat().st_size == before and time.monotonic() < until:
            time.sleep(0.02)
        assert path.read_text().count("stuck_in_foreign_code") == 2, "and once more when asked"
        assert process.poll() is None, "it is not ended"
    finally:
        process.kill()
        process.wait()


def test_silence_is_told_once_and_what_came_last(tmp_path: Path) -> None:
    told: list[str] = []
    path = stacks_path(tmp_path, 3)
    with HangWatch(path, 0.1, told.append) as watch:
        list(watch.beating(iter([1, 2]), "an update"))
        until = time.monotonic() + 20
        while not told and time.monotonic() < until:
            time.sleep(0.01)
        time.sleep(0.3)
    assert len(told) == 1 and "last: an update" in told[0]
    assert "stacks-rank-3.txt" in told[0] and "test_silence_is_told" in path.read_text()


def test_a_sample_that_is_read_for_ever_is_named(tmp_path: Path) -> None:
    told: list[str] = []
    path = stacks_path(tmp_path, 0)
    with HangWatch(path, 60.0, told.append, lambda: "sample 17 of faces", 0.1) as watch:
        watch.beat("an update")
        until = time.monotonic() + 20
        while not told and time.monotonic() < until:
            time.sleep(0.01)
        time.sleep(0.3)
    assert len(told) == 1 and "reading sample 17 of faces has not ended for" in told[0]
    assert "test_a_sample_that_is_read" in path.read_text()


def test_a_run_that_goes_on_leaves_no_file(tmp_path: Path) -> None:
    told: list[str] = []
    path = tmp_path / "stacks.txt"
    before = signal.getsignal(ASK_SIGNAL)
    with HangWatch(path, 5.0, told.append) as watch:
        for _ in range(10):
            watch.beat("an update")
            time.sleep(0.01)
    assert not path.exists() and not told
    assert signal.getsignal(ASK_SIGNAL) == before
    assert not faulthandler.unregister(ASK_SIGNAL)


def test_the_flight_recorder_writes_into_the_run_unless_told_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    variables = {**FLIGHT_RECORDER, **flight_recorder_files(tmp_path)}
    assert all(name.startswith("TORCH_") for name in variables)
    for name in variables:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "7")
    monkeypatch.setattr(os, "environ", dict(os.environ))
    set_where_free(variables)
    assert os.environ["TORCH_FR_BUFFER_SIZE"] == "7"
    assert os.environ["TORCH_FR_DUMP_TEMP_FILE"] == str(tmp_path / "nccl-rank-")
