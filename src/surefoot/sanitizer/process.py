"""The audit of one process that runs a script: from the moment it has torch to its report.

Imports no torch itself: what a script sets before its own `import torch` (threads, visible devices)
has to take effect.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.util
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from surefoot.sanitizer.request import Request, request_as_json
from surefoot.sanitizer.summary import Summary, failure


class ProcessAudit:
    """An audit that begins once and ends once."""

    def __init__(self, request: Request, folder: Path) -> None:
        self.request = request
        self.folder = folder
        self._watch: Any = None
        self._error = ""
        self._reporter: Any = None
        self._children: Any = None

    def attach(self) -> None:
        """Begins to watch; loads torch. Where that fails, the script runs unwatched."""
        try:
            self._attach()
        except Exception:
            self._error = failure("attach")
            if self._watch is not None:
                self._watch.probe.detach()
            self._watch = None

    def _attach(self) -> None:
        session = importlib.import_module("surefoot.sanitizer.session")
        children = importlib.import_module("surefoot.sanitizer.children")
        reporter = importlib.import_module("surefoot.sanitizer.reporter")
        self._watch = session.Audit(deep=self.request.deep, max_updates=self.request.max_updates)
        self._watch.probe.attach()
        children.remember(self._watch)
        self._children = children.AuditedChildren(request_as_json(self.request), self.folder)
        self._children.__enter__()
        self._reporter = reporter.Reporter(self._watch, self.folder)
        self._reporter.__enter__()

    def attach_with_torch(self) -> None:
        """Begins to watch as soon as torch has been loaded, by whomever."""
        if "torch" in sys.modules:
            self.attach()
        else:
            sys.meta_path.insert(0, _AfterImport("torch", self.attach))

    def end(self, outcome: str) -> Summary:
        """Stops watching; a script that never loaded torch has nothing to be said about."""
        if self._watch is None:
            sys.meta_path[:] = [f for f in sys.meta_path if not isinstance(f, _AfterImport)]
            errors = [self._error] * bool(self._error)
            return Summary(0, outcome, updates=0, findings=[], internal_errors=errors)
        self._reporter.__exit__(None, None, None)
        self._children.__exit__(None, None, None)
        self._watch.end(outcome)
        summary: Summary = self._watch.summary()
        return summary

    @property
    def has_nothing_new(self) -> bool:
        """Whether this is a forked child that trained nothing of its own."""
        return self._reporter is not None and self._reporter.has_nothing_new


class _AfterImport(importlib.abc.MetaPathFinder):
    """Calls `action` right after the module `name` has been executed for the first time."""

    def __init__(self, name: str, action: Callable[[], None]) -> None:
        self.name = name
        self.action = action

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if fullname != self.name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        loader: Any = None if spec is None else spec.loader
        if loader is None:
            return spec
        original = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            loader.exec_module = original
            original(module)
            self.action()

        loader.exec_module = exec_module
        return spec
