"""Runs a script, a module or a group of ranks under the audit, and collects what they say.

The script's own exit code is passed on; what it raises is reported and never swallowed in silence.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import tempfile
import traceback
import types
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from surefoot.core.errors import RequestError
from surefoot.core.finding import Finding
from surefoot.sanitizer.children import Followers, launch_ranks, remember
from surefoot.sanitizer.request import (
    Request,
    request_as_json,
    request_from_json,
    write_report,
)
from surefoot.sanitizer.session import Audit, Summary, merged
from surefoot.sanitizer.trace import StopAudit


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
    with tempfile.TemporaryDirectory(prefix="surefoot-audit-") as name:
        folder = Path(name)
        if request.num_ranks > 1:
            code = launch_ranks(request_as_json(request), folder, request.num_ranks)
            own = None
        else:
            own, code = run_here(request, folder)
        summaries = [Summary.from_json(json.loads(f.read_text())) for f in _reports(folder)]
        if own is not None and (own.updates or own.findings or not summaries):
            summaries.insert(0, own)
    return Result(
        findings=merged(summaries) if summaries else [],
        exit_code=code,
        outcome=_joint([summary.outcome for summary in summaries]),
        updates=max((summary.updates for summary in summaries), default=0),
        num_processes=max(len(summaries), 1),
        internal_errors=tuple(e for summary in summaries for e in summary.internal_errors),
    )


def _reports(folder: Path) -> list[Path]:
    return sorted(folder.glob("report-*.json"))


def _joint(outcomes: Sequence[str]) -> str:
    for outcome in ("crashed", "interrupted", "stopped", "completed"):
        if outcome in outcomes:
            return outcome
    return "crashed"


def run_here(request: Request, folder: Path) -> tuple[Summary, int]:
    """Runs the script in this process; returns what was seen and its exit code."""
    watch = Audit(deep=request.deep, max_updates=request.max_updates)
    code, outcome = 0, "completed"
    saved_argv, saved_path = sys.argv[:], sys.path[:]
    saved_main = sys.modules["__main__"]
    watch.probe.attach()
    remember(watch)
    try:
        with Followers(request_as_json(request), folder):
            _execute(request)
    except StopAudit:
        outcome = "stopped"
    except SystemExit as stop:
        code = _exit_code(stop)
        outcome = "completed" if code == 0 else "crashed"
    except KeyboardInterrupt:
        code, outcome = 130, "interrupted"
    except BaseException:
        code, outcome = 1, "crashed"
        _print_users_traceback()
    finally:
        sys.stdout.flush()
        watch.end(outcome)
        sys.argv, sys.path = saved_argv, saved_path
        sys.modules["__main__"] = saved_main
    return watch.summary(), code


def _execute(request: Request) -> None:
    sys.argv = [request.target, *request.arguments]
    if request.is_module:
        sys.path.insert(0, os.getcwd())
        runpy.run_module(request.target, run_name="__main__", alter_sys=True)
        return
    path = os.path.abspath(request.target)
    sys.path.insert(0, os.path.dirname(path))
    main = types.ModuleType("__main__")
    main.__dict__.update(__file__=path, __builtins__=__builtins__, __spec__=None)
    sys.modules["__main__"] = main
    with open(path, "rb") as file:
        code = compile(file.read(), path, "exec", dont_inherit=True)
    exec(code, main.__dict__)


def _exit_code(stop: SystemExit) -> int:
    if stop.code is None:
        return 0
    if isinstance(stop.code, int):
        return stop.code
    print(stop.code, file=sys.stderr)
    return 1


def _print_users_traceback() -> None:
    kind, error, trace = sys.exc_info()
    # The frames of the audit itself say nothing to the user.
    while trace is not None and "sanitizer" in trace.tb_frame.f_code.co_filename:
        trace = trace.tb_next
    if kind is not None:
        traceback.print_exception(kind, error, trace)


def main(arguments: Sequence[str]) -> int:
    """Entry of one rank: folder and request."""
    folder, text = Path(arguments[0]), arguments[1]
    summary, code = run_here(request_from_json(text), folder)
    write_report(summary, folder)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
