"""SFD703: a large share of the time is spent waiting for data."""

from __future__ import annotations

import numpy as np

from surefoot.core.finding import Certainty, Severity
from surefoot.diagnosis.causes.base import Cause, CauseInfo, Verdict
from surefoot.diagnosis.signals import SHORTEST, Signals

SHARE = 0.3
"""Share of the time from which on it is told."""


class WaitingForData(Cause):
    """A large share of the time is spent waiting for data."""

    info = CauseInfo(
        code="SFD703",
        slug="waiting-for-data",
        severity=Severity.WARNING,
        certainty=Certainty.STRONG,
        title="A large share of the time is spent waiting for data.",
        observes="The sum of the waiting times over the sum of the updates', after the first rows;"
        " how much of it falls on the first rows of epochs.",
        why="The device stands still while samples are read, decoded and collated; or the loader's"
        " workers are started anew each epoch.",
        fix="More workers (loader.workers), pinned memory, prefetching; keep workers over epochs"
        " (persistent_workers); decode once and store; where Python itself is the limit, processes"
        " in place of threads.",
        source="https://docs.pytorch.org/docs/stable/data.html (multi-process loading)",
        needs=(
            "step_seconds",
            "data_seconds",
        ),
        explains=("device-underused",),
    )

    def look(self, signals: Signals) -> Verdict | None:
        _, seconds, waiting = signals.recording.aligned("step_seconds", "data_seconds")
        sound = np.isfinite(seconds) & np.isfinite(waiting) & (seconds >= 0) & (waiting >= 0)
        seconds, waiting = seconds[sound][2:], waiting[sound][2:]
        if len(seconds) < SHORTEST or float(seconds.sum()) <= 0:
            return None
        lost = float(waiting.sum() / seconds.sum())
        if lost < SHARE:
            return None
        typical = float(np.median(waiting) / max(float(np.median(seconds)), 1e-30))
        bursts = typical < 0.5 * lost
        text = (
            f" It comes in bursts: a usual update waits {typical:.0%} of its time."
            if bursts
            else ""
        )
        return Verdict(
            f"{lost:.0%} of the time was spent waiting for data ({waiting.sum():.3g} of"
            f" {seconds.sum():.3g} s; longest {waiting.max():.3g} s).{text}",
            weight=0.6 + 0.25 * min(1.0, lost),
            evidence={
                "share": lost,
                "usual_share": typical,
                "seconds_waiting": float(waiting.sum()),
                "longest_wait": float(waiting.max()),
            },
        )
