"""Replacing attributes of torch for a while, and putting back exactly what was there.

Knows nothing of what is observed.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from surefoot.sanitizer.frames import is_user_file
from surefoot.sanitizer.trace import Trace

_MISSING = object()
_running_transform = getattr(torch._C._functorch, "peek_interpreter_stack", lambda: None)


def _is_transformed() -> bool:
    """Whether torch compiles, or runs a transform (`vmap`, `grad`) whose tensors have no values."""
    return torch.compiler.is_compiling() or _running_transform() is not None


class Patches:
    """Everything that one attachment changed."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self._undo: list[Callable[[], None]] = []

    def around(
        self, owner: Any, name: str, observe: Callable[..., Any], *, rebind: bool = False
    ) -> None:
        """Calls `observe(original, *args, **kwargs)` in place of `owner.name`.

        `observe` must call `original` exactly once and return its result. With `rebind`, names
        that modules of the user hold from an earlier `from ... import` follow too.
        """
        original = vars(owner).get(name, _MISSING)
        if original is _MISSING:
            return
        trace = self.trace

        @functools.wraps(original)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if not trace.active or trace.busy or _is_transformed():
                return original(*args, **kwargs)
            return observe(original, *args, **kwargs)

        self.set(owner, name, wrapper)
        if rebind:
            self._rebind(original, wrapper)

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Sets one attribute until `restore`."""
        before = vars(owner).get(name, _MISSING)
        setattr(owner, name, value)

        def undo() -> None:
            # Whoever patched over us keeps what they set; our wrapper then only passes through.
            if vars(owner).get(name) is not value:
                return
            if before is _MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, before)

        self._undo.append(undo)

    def _rebind(self, original: Any, wrapper: Any) -> None:
        for module in list(sys.modules.values()):
            # Modules that load themselves late may run code, and fail, when they are asked.
            names = getattr(module, "__dict__", None) if isinstance(module, ModuleType) else None
            file = None if names is None else names.get("__file__")
            if names is None or not isinstance(file, str) or not is_user_file(file):
                continue
            for name, value in list(names.items()):
                if value is original:
                    self.set(module, name, wrapper)

    def on_restore(self, undo: Callable[[], None]) -> None:
        self._undo.append(undo)

    def restore(self) -> None:
        """Puts everything back, in reverse order."""
        while self._undo:
            try:
                self._undo.pop()()
            except Exception:
                self.trace.note_error("restore")
