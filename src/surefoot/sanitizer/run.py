"""Runs a script or a module under the audit, in this process; the entry point of audited processes.

The script's own exit code is passed on; what it raises is reported and never swallowed in silence.
Imports no torch: that is left to the script.
"""

from __future__ import annotations

import contextlib
import importlib.machinery
import os
import runpy
import signal
import sys
import threading
import traceback
import types
from collections.abc import Sequence
from pathlib import Path

from surefoot.sanitizer.process import ProcessAudit
from surefoot.sanitizer.request import Request, StopAudit, request_from_json
from surefoot.sanitizer.summary import Summary, write_report

CODE_OF_INTERRUPT = 130


def run_here(request: Request, folder: Path) -> tuple[Summary, int]:
    """Runs the script in this process; returns what was seen and its exit code.

    A script that ends its process ends the caller too.
    """
    saved_argv, saved_path = sys.argv[:], sys.path[:]
    saved_main = sys.modules["__main__"]
    process = ProcessAudit(request, folder)
    process.attach()
    code, outcome = 1, "crashed"
    try:
        code, outcome = _outcome_of(request)
    finally:
        summary = process.end(outcome)
        sys.argv, sys.path = saved_argv, saved_path
        sys.modules["__main__"] = saved_main
    return summary, code


def main(arguments: Sequence[str]) -> int:
    """Entry of a process that does nothing else: folder and request."""
    folder, request = Path(arguments[0]), request_from_json(arguments[1])
    if not sys.flags.safe_path:
        # What `-m` put there for us; a script has its own folder there instead.
        sys.path.pop(0)
    process = ProcessAudit(request, folder)
    process.attach_with_torch()
    code, outcome = _outcome_of(request)
    if outcome in ("completed", "crashed"):
        _wait_for_threads()
    # From here on an impatient Ctrl-C would only cost the report.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    is_news = not process.has_nothing_new
    summary = process.end(outcome)
    if is_news:
        with contextlib.suppress(OSError):
            write_report(summary, folder)
    return code


def _outcome_of(request: Request) -> tuple[int, str]:
    try:
        _execute(request)
    except StopAudit:
        return 0, "stopped"
    except SystemExit as stop:
        code = _exit_code(stop)
        return code, "completed" if code == 0 else "crashed"
    except KeyboardInterrupt:
        _show_users_error()
        return CODE_OF_INTERRUPT, "interrupted"
    except BaseException:
        _show_users_error()
        return 1, "crashed"
    finally:
        # A script may have closed or replaced it.
        with contextlib.suppress(Exception):
            sys.stdout.flush()
    return 0, "completed"


def _execute(request: Request) -> None:
    sys.argv = [request.target, *request.arguments]
    if request.is_module:
        sys.path.insert(0, os.getcwd())
        runpy.run_module(request.target, run_name="__main__", alter_sys=True)
        return
    path = os.path.abspath(request.target)
    sys.path.insert(0, os.path.dirname(os.path.realpath(path)))
    main = types.ModuleType("__main__")
    loader = importlib.machinery.SourceFileLoader("__main__", path)
    # As Python fills in the main module of a script.
    main.__dict__.update(__file__=path, __builtins__=__builtins__, __loader__=loader)
    main.__dict__.update(__spec__=None, __package__=None, __cached__=None, __annotations__={})
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


def _show_users_error() -> None:
    kind, error, trace = sys.exc_info()
    # The frames of the audit itself say nothing to the user.
    while trace is not None and trace.tb_frame.f_code.co_filename in (__file__, runpy.__file__):
        trace = trace.tb_next
    if kind is None or error is None:
        return
    if sys.excepthook is not sys.__excepthook__:
        sys.excepthook(kind, error, trace)
    else:
        traceback.print_exception(kind, error, trace)


def _wait_for_threads() -> None:
    # Python waits for them at its end; what they train is to be seen.
    for thread in threading.enumerate():
        if not thread.daemon and thread is not threading.main_thread():
            thread.join()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
