"""Follows the audit into other interpreters: spawned processes, and scripts that a script starts.

What is patched in a parent is absent in a child that starts anew, so the audit starts again there.
Data workers are left alone.
"""

from __future__ import annotations

import functools
import multiprocessing
import multiprocessing.process
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

from surefoot.sanitizer.frames import is_user_file
from surefoot.sanitizer.reporter import Reporter
from surefoot.sanitizer.request import request_as_json, request_from_json
from surefoot.sanitizer.session import Audit
from surefoot.sanitizer.summary import write_report

RUNNER = "surefoot.sanitizer.run"


class AuditedTarget:
    """The target of a child process, with the audit around it. Picklable if the target is."""

    def __init__(self, target: Any, request: str, folder: str) -> None:
        self.target = target
        self.request = request
        self.folder = folder

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        request = request_from_json(self.request)
        _forget_inherited()
        watch = Audit(deep=request.deep, max_updates=request.max_updates)
        if "RANK" not in os.environ:
            watch.rank_by_name = _rank_seen(args, self.folder)
        try:
            with watch, Reporter(watch, Path(self.folder)):
                return self.target(*args, **kwargs)
        finally:
            summary = watch.summary()
            if watch.trace.updates or watch.findings:
                write_report(summary, Path(self.folder))


def _rank_seen(args: tuple[Any, ...], folder: str) -> int:
    # torch.multiprocessing.spawn passes (function, rank, arguments, error file).
    for value in args:
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    return len(list(Path(folder).glob("report-*.json")))


_inherited: list[Any] = []


def remember(watch: Audit) -> None:
    """Names the audit that forked children would inherit."""
    _inherited.append(watch)


def _forget_inherited() -> None:
    """In a forked child: switches off the copy of the parent's audit."""
    for watch in _inherited:
        watch.trace.active = False


def audited_command(command: Any, request: str, folder: str) -> list[str] | None:
    """The command that runs the same Python script or module under the audit; None for others.

    >>> audited_command([sys.executable, "-c", "pass"], "{}", "here") is None
    True
    """
    if not isinstance(command, list | tuple) or not command:
        return None
    words = [os.fsdecode(word) for word in command if isinstance(word, str | bytes | os.PathLike)]
    if len(words) != len(command) or words[0] != sys.executable:
        return None
    at = 1
    while at < len(words) and words[at] in ("-u", "-O", "-B"):
        at += 1
    is_module = words[at : at + 1] == ["-m"]
    at += is_module
    target = words[at] if at < len(words) else "-"
    is_script = target.endswith(".py") and os.path.isfile(target) and is_user_file(target)
    if target.startswith(("-", RUNNER)) or not (is_module or is_script):
        return None
    inner = replace(
        request_from_json(request),
        target=target,
        arguments=tuple(words[at + 1 :]),
        is_module=is_module,
    )
    before = words[: at - is_module]
    return [*before, "-m", RUNNER, folder, request_as_json(inner)]


class AuditedChildren:
    """While active, child processes that this one starts are audited too."""

    def __init__(self, request: str, folder: Path) -> None:
        self.request = request
        self.folder = str(folder)
        self._undo: list[Callable[[], None]] = []

    def __enter__(self) -> AuditedChildren:
        base: Any = multiprocessing.process.BaseProcess
        opened: Any = subprocess.Popen
        request, folder = self.request, self.folder
        start_before, open_before = base.start, opened.__init__

        def start(process: Any) -> None:
            target = getattr(process, "_target", None)
            module = getattr(target, "__module__", "") or ""
            if target is not None and not module.startswith(("torch.utils.data", "multiprocess")):
                process._target = AuditedTarget(target, request, folder)
            start_before(process)

        @functools.wraps(open_before)
        def open_process(self: Any, args: Any, *rest: Any, **options: Any) -> None:
            if not options.get("shell") and not options.get("executable"):
                args = audited_command(args, request, folder) or args
            open_before(self, args, *rest, **options)

        base.start = start
        opened.__init__ = open_process
        self._undo = [
            lambda: setattr(base, "start", start_before),
            lambda: setattr(opened, "__init__", open_before),
        ]
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for undo in self._undo:
            undo()
