"""A part of an audit that receives events: a rule, or a matcher that several rules share."""

from __future__ import annotations

from abc import ABC
from typing import TypeVar

from surefoot.sanitizer import events as ev
from surefoot.sanitizer.trace import Trace

L = TypeVar("L", bound="Listener")


class Listener(ABC):  # noqa: B024 - no event is obligatory
    """Receives each event by the method named after it: `BackwardEnd` by `on_backward_end`.

    It keeps counters, names and sites; never tensors, modules or events.
    """

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self._used: list[Listener] = []
        self.setup()

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        for name in vars(cls):
            if name.startswith("on_") and name not in ev.HANDLERS:
                raise TypeError(f"no event calls {cls.__name__}.{name}; there are {[*ev.HANDLERS]}")

    def setup(self) -> None:  # noqa: B027 - not every listener keeps something
        """Makes what is counted in; called once, before any event."""

    def use(self, kind: type[L]) -> L:
        """The matcher of that kind, which all rules of one audit share.

        It receives each event before the rules that use it.
        """
        shared: L = self.trace.shared(kind)
        self._used.append(shared)
        return shared

    @property
    def has_failed(self) -> bool:
        """Whether a handler of its own, or of a matcher that it uses, has raised."""
        return self in self.trace.failed or any(part.has_failed for part in self._used)
