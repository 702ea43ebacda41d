"""SFD703: a large share of the time is spent waiting for data."""

from __future__ import annotations

import numpy as np

from surefoot.core.finding import Certainty, Severity
from surefoot.diagnosis.causes.base import Cause, CauseInfo, Verdict
from surefoot.diagnosis.recording import Floats, Recording
from surefoot.diagnosis.signals import SHORTEST, Signals

SHARE = 0.3
MOST_PERCENT = 100.0
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
        needs=("data_seconds or data_share",),
        explains=("device-underused",),
    )

    def look(self, signals: Signals) -> Verdict | None:
        seconds, waiting = _times(signals.recording)
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
            f" {seconds.sum():.3g}; longest {waiting.max():.3g}).{text}",
            weight=0.6 + 0.25 * min(1.0, lost),
            evidence={
                "share": lost,
                "usual_share": typical,
                "waiting": float(waiting.sum()),
                "longest_wait": float(waiting.max()),
            },
        )


def _times(recording: Recording) -> tuple[Floats, Floats]:
    """Of each row: how long its updates took, and how long they waited; or 1 and the share."""
    if recording.has("step_seconds", "data_seconds"):
        _, seconds, waiting = recording.aligned("step_seconds", "data_seconds")
        return seconds, waiting
    if recording.has("compute_seconds", "data_seconds"):
        _, computing, waiting = recording.aligned("compute_seconds", "data_seconds")
        return computing + waiting, waiting
    share = recording["data_share"].values
    if not len(share) and recording.has("device_utilization"):
        # Beside a utilisation, and with nothing to compare with, it can only be a share.
        share = recording["data_seconds"].values
    if not len(share) or share[np.isfinite(share)].max(initial=0.0) > MOST_PERCENT:
        return np.empty(0), np.empty(0)
    if share[np.isfinite(share)].max(initial=0.0) > 1.5:
        share = share / 100
    return np.ones(len(share)), share
