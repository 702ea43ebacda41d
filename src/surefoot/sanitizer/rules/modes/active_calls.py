"""Counts forwards of a module in which dropout was active or BatchNorm updated its statistics."""

from __future__ import annotations

from typing import Any

from surefoot.sanitizer import events as ev

MOST_INTERVALS = 10_000


class ActiveCalls:
    """Such forwards of one module."""

    def __init__(self) -> None:
        self.name = ""
        self.count = self.dropout = self.batch_norm = 0
        self.intervals: set[int] = set()
        """Numbers of updates after which it was called."""

    def add(self, event: ev.ForwardEnd, updates: int) -> None:
        self.name = type(event.module).__name__
        self.count += 1
        self.dropout += event.active_dropout > 0
        self.batch_norm += event.active_batch_norm > 0
        if len(self.intervals) < MOST_INTERVALS:
            self.intervals.add(updates)

    @property
    def evidence(self) -> dict[str, Any]:
        return {
            "forwards": self.count,
            "with_active_dropout": self.dropout,
            "with_updating_batch_norm": self.batch_norm,
        }


def is_active(event: ev.ForwardEnd) -> bool:
    """Whether a forward in train mode dropped values or updated statistics."""
    return event.training and event.active_dropout + event.active_batch_norm > 0
