"""Starts audited processes, waits for them, and collects what they say, however they end.

Imports no torch where one process is audited. Watches nothing itself.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from surefoot.core.errors import RequestError
from surefoot.core.finding import Finding
from surefoot.sanitizer.reports import merged_reports
from surefoot.sanitizer.request import Request, request_as_json
from surefoot.sanitizer.summary import RUNNING, Summary, read_reports

SECONDS_FOR_OTHER_RANKS = 60.0
SHELL_CODE_OF_SIGNAL = 128


@dataclass(frozen=True)
class Result:
    """What came of it."""

    findings: list[Finding]
    exit_code: int
    """The script's own."""
    outcome: str
    updates: int
    num_processes: int
    internal_errors: tuple[str, ...] = ()
    is_reported_elsewhere: bool = False
    """Whether another rank, started beside this one by a launcher, reports what all have seen."""


def audit(request: Request) -> Result:
    """Runs `request` to its end.

    Raises:
        RequestError: there is no such script.
    """
    if not request.is_module and not Path(request.target).is_file():
        raise RequestError(
            f"there is no script {request.target}",
            rule="SCRIPT is a Python file; with -m it is a module",
        )
    text = request_as_json(request)
    if request.num_ranks == 1 and _launched_ranks() > 1:
        return _beside_others(text)
    folder = Path(tempfile.mkdtemp(prefix="surefoot-audit-"))
    try:
        if request.num_ranks > 1:
            code = _launch_ranks(text, folder, request.num_ranks)
        else:
            code = _run_one(text, folder)
        return _result(read_reports(folder), code)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _result(summaries: Sequence[Summary], code: int) -> Result:
    trained = [s for s in summaries if s.updates or s.findings]
    relevant = trained or list(summaries[:1])
    # Rules that fail to compare ranks add their errors to these summaries.
    findings = merged_reports(relevant)
    return Result(
        findings=findings,
        exit_code=code,
        outcome=_joint([summary.outcome for summary in summaries], code),
        updates=max((summary.updates for summary in relevant), default=0),
        num_processes=max(len(relevant), 1),
        internal_errors=tuple(e for summary in summaries for e in summary.internal_errors),
    )


def _joint(outcomes: Sequence[str], code: int) -> str:
    known = ["killed" if outcome == RUNNING else outcome for outcome in outcomes]
    if not known:
        return "killed" if code > SHELL_CODE_OF_SIGNAL else "crashed"
    for outcome in ("killed", "crashed", "interrupted", "stopped"):
        if outcome in known:
            return outcome
    # A child that was told to end by its parent is no crash of the script.
    return "completed" if code == 0 else "crashed"


# -- one process ---------------------------------------------------------------------------------


def _run_one(text: str, folder: Path) -> int:
    """Runs the script in an interpreter like this one; returns its exit code as a shell has it."""
    flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    command = [sys.executable, *flags, "-m", "surefoot.sanitizer.run", str(folder), text]
    process = subprocess.Popen(command)
    with _signals_passed_on(process):
        code = process.wait()
    return code if code >= 0 else SHELL_CODE_OF_SIGNAL - code


@contextlib.contextmanager
def _signals_passed_on(process: subprocess.Popen[bytes]) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def pass_on(number: int, frame: Any) -> None:
        # A terminal sends Ctrl-C to both of us.
        if number != signal.SIGINT or not (sys.stdin and sys.stdin.isatty()):
            process.send_signal(number)

    watched = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [(number, signal.signal(number, pass_on)) for number in watched]
    try:
        yield
    finally:
        for number, handler in before:
            signal.signal(number, handler)


# -- several ranks -------------------------------------------------------------------------------


def _launch_ranks(text: str, folder: Path, num_ranks: int) -> int:
    """Starts `num_ranks` ranks on this machine by torch's own launcher; returns its exit code."""
    # Heavy, and needed for several ranks only.
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    options = ["--standalone", f"--nproc-per-node={num_ranks}", "-m", "surefoot.sanitizer.run"]
    try:
        torchrun.main([*options, str(folder), text])
    except ChildFailedError as failed:
        codes = [failure.exitcode for failure in failed.failures.values()]
        code = next((code for code in codes if code), 1)
        return code if code > 0 else SHELL_CODE_OF_SIGNAL - code
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else 1
    return 0


def _launched_ranks() -> int:
    """Ranks that a launcher such as torchrun started on this machine, this process among them."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return 1
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def _beside_others(text: str) -> Result:
    """Audits one rank; local rank 0 waits for the reports of the others and tells all."""
    names = ("TORCHELASTIC_RUN_ID", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT")
    run = "-".join(os.environ.get(name, "0").replace(os.sep, "_") for name in names)
    folder = Path(tempfile.gettempdir()) / f"surefoot-audit-{os.getuid()}-{run}"
    folder.mkdir(mode=0o700, exist_ok=True)
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    code = _run_one(text, folder)
    (folder / f"done-{local_rank}").touch()
    if local_rank:
        return Result([], code, "completed" if code == 0 else "crashed", 0, 1, (), True)
    deadline = time.monotonic() + SECONDS_FOR_OTHER_RANKS
    while len(list(folder.glob("done-*"))) < _launched_ranks() and time.monotonic() < deadline:
        time.sleep(0.05)
    try:
        return _result(read_reports(folder), code)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
