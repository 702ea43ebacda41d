"""Follows the audit into other interpreters: ranks of a launcher, and spawned processes.

What is patched in a parent is absent in a child that starts anew, so the audit starts again there.
Data workers are left alone.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.process
import os
from pathlib import Path
from types import TracebackType
from typing import Any

from surefoot.sanitizer.reporter import Reporter
from surefoot.sanitizer.request import request_from_json
from surefoot.sanitizer.session import Audit
from surefoot.sanitizer.summary import write_report


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


class Followers:
    """While active, child processes that this one starts are audited too."""

    def __init__(self, request: str, folder: Path) -> None:
        self.request = request
        self.folder = str(folder)
        self._original: Any = None

    def __enter__(self) -> Followers:
        base = multiprocessing.process.BaseProcess
        self._original = base.start
        request, folder, original = self.request, self.folder, base.start

        def start(process: Any) -> None:
            target = getattr(process, "_target", None)
            module = getattr(target, "__module__", "") or ""
            if target is not None and not module.startswith(("torch.utils.data", "multiprocess")):
                process._target = AuditedTarget(target, request, folder)
            original(process)

        base.start = start  # type: ignore[method-assign, assignment]
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        multiprocessing.process.BaseProcess.start = self._original  # type: ignore[method-assign]
