"""Causes in memory, time and restarts: no memory, leaks, waiting, idle devices, a bad resume."""

from __future__ import annotations

import math
import re

import numpy as np

from surefoot.diagnosis import thresholds as limits
from surefoot.diagnosis.causes.base import Sign, cause, sign
from surefoot.diagnosis.causes.page import own_page
from surefoot.diagnosis.log_features.log import LogFeatures
from surefoot.diagnosis.needs import DEVICE_UTILIZATION, EVENTS, LOSS, MEMORY, WAITING_TIME
from surefoot.diagnosis.recording import Floats, Recording
from surefoot.diagnosis.robust import RobustSeries, linearity, spread

# -- memory ----------------------------------------------------------------------------------------

NO_MEMORY = re.compile(
    r"out of memory|OutOfMemory|MemoryError|not enough memory|bad_alloc|\bOOM\b"
    r"|(?:cannot|unable to|failed to|could not) allocate",
    re.IGNORECASE,
)
"""What CUDA, the CPU's allocator (`not enough memory: you tried to allocate`), numpy, C++ and the
kernel say."""
FAILURES = (
    "failure", "failed", "error", "crash", "crashed", "exception", "killed", "abort", "fatal",
)  # fmt: skip
"""What logs call the event of an end that was not wanted."""


@cause(own_page("out-of-memory"), needs=(EVENTS,))
def out_of_memory(log: LogFeatures) -> Sign | None:
    """The run ended because memory ran out."""
    for event in reversed(log.recording.events):
        text = f"{event.message} {event.data.get('type', '')}"
        if event.kind.lower() in FAILURES and NO_MEMORY.search(text):
            peak = log.recording["memory_bytes"].finite.values.max(initial=-1.0)
            return sign(
                "ended",
                step=event.step,
                error=event.message.strip()[:200],
                peak_bytes=float(peak) if peak >= 0 else None,
                peak_gib=float(peak) / 2**30 if peak >= 0 else None,
            )
    return None


@cause(own_page("memory-leak"), needs=(MEMORY,))
def memory_leak(log: LogFeatures) -> Sign | None:
    """Memory grows with every update."""
    series = (RobustSeries(log.recording[need.name]) for need in MEMORY.needs)
    found = (_grows(memory, log.recording.last_step) for memory in series)
    return next((seen for seen in found if seen is not None), None)


def _grows(memory: RobustSeries, last_step: int) -> Sign | None:
    if len(memory) < 30:
        return None
    late = memory.smooth[len(memory) // 5 :]
    quarter = len(late) // 4
    parts = [float(np.median(late[i * quarter : (i + 1) * quarter])) for i in range(4)]
    rises, rise = np.diff(parts), parts[-1] - parts[0]
    if linearity(late) < 0.97 or rise / max(parts[0], 1.0) < limits.MIN_GROWTH_OF_MEMORY:
        return None
    if rises.min() < 0.4 * rises.mean():
        return None
    per_update = rise / (0.75 * max(1, last_step) * 0.8)
    return sign(
        "grows",
        first_bytes=parts[0],
        last_bytes=parts[-1],
        bytes_per_update=per_update,
        first_mib=parts[0] / 2**20,
        last_mib=parts[-1] / 2**20,
        kib_per_update=per_update / 2**10,
    )


# -- time ------------------------------------------------------------------------------------------


@cause(own_page("waiting-for-data"), needs=(WAITING_TIME,))
def waiting_for_data(log: LogFeatures) -> Sign | None:
    """A large share of the time is spent waiting for data."""
    seconds, waiting = _times(log.recording)
    sound = np.isfinite(seconds) & np.isfinite(waiting) & (seconds >= 0) & (waiting >= 0)
    seconds, waiting = seconds[sound][2:], waiting[sound][2:]
    if len(seconds) < limits.MIN_ROWS or float(seconds.sum()) <= 0:
        return None
    lost = float(waiting.sum() / seconds.sum())
    if lost < limits.MIN_WAITING_SHARE:
        return None
    typical = float(np.median(waiting) / max(float(np.median(seconds)), 1e-30))
    return sign(
        "waits-in-bursts" if typical < 0.5 * lost else "waits",
        score=0.6 + 0.25 * min(1.0, lost),
        share=lost,
        usual_share=typical,
        waiting=float(waiting.sum()),
        total=float(seconds.sum()),
        longest_wait=float(waiting.max()),
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
    highest = share[np.isfinite(share)].max(initial=0.0)
    if highest > 100.0:
        return np.empty(0), np.empty(0)
    return np.ones(len(share)), share / 100 if highest > 1.5 else share


@cause(own_page("device-underused"), needs=(DEVICE_UTILIZATION,))
def device_underused(log: LogFeatures) -> Sign | None:
    """The device is busy for less than 70 % of the time."""
    shares = log.recording["device_utilization"].finite.values
    # What is recorded of a CPU is the load of the machine.
    is_cpu = str(log.recording.facts.get("device", "")).startswith("cpu")
    if is_cpu or len(shares) < limits.MIN_ROWS:
        return None
    usual = float(np.median(shares[len(shares) // 10 :]))
    if usual >= limits.MIN_DEVICE_UTILIZATION:
        return None
    return sign("idle", median=usual, highest=float(shares.max()), rows=len(shares))


# -- resume ----------------------------------------------------------------------------------------

RESUMED = re.compile(r"\bresum(e|es|ed|ing)\b", re.IGNORECASE)
"""What an event that is a resume says of itself, or is called."""
JUMP_ROWS = (4, 10, 25)
"""Rows before and after over which a jump is sought: the longer, the smaller it may be."""


@cause(own_page("resume-jump"), needs=(LOSS,), min_losses=30)
def resume_jump(log: LogFeatures) -> Sign | None:
    """After a resume the run does not continue as before."""
    found = [seen for place in _resumes(log) if (seen := _change_at(log, place)) is not None]
    jumps = [seen for seen in found if seen.name == "jumps"]
    return next(iter([*jumps, *found]), None)


def _resumes(log: LogFeatures) -> list[int]:
    """Positions in the loss of the first row after each resume."""
    steps = log.loss.series.steps
    back = (np.flatnonzero(np.diff(steps) < 0) + 1).tolist()
    stated = []
    for event in log.recording.events:
        if RESUMED.search(event.kind) or RESUMED.search(event.message):
            near = [p for p in back if steps[p] in (event.step, event.step + 1)]
            # Logs count updates from 0 or from 1: the row of the event's step is the first one
            # after the resume, or the last one before.
            stated += near or [
                int(np.searchsorted(steps, event.step)),
                int(np.searchsorted(steps, event.step, side="right")),
            ]
    return sorted({int(p) for p in [*back, *stated] if 10 <= p <= len(steps) - 5})


def _change_at(log: LogFeatures, place: int) -> Sign | None:
    loss = log.loss
    before, after = loss.values[max(0, place - 15) : place], loss.values[place:]
    line = np.polynomial.Polynomial.fit(np.arange(-len(before), 0), before, 1)
    noise = max(spread(before - line(np.arange(-len(before), 0))), loss.noise)
    level = float(np.median(before[-5:]))
    jumps = False
    for width in JUMP_ROWS:
        jumps = _jumps(
            loss.values[max(0, place - max(5, width)) : place], after, width, noise, level
        )
        if jumps:
            break
    rates, odd_rate = _rate_step(log, place)
    speed_up = _speed_up_of_weights(log, place)
    faster = speed_up >= limits.MIN_SPEED_UP_OF_WEIGHTS
    restarts = _count_restarts(log, place)
    if not (jumps or odd_rate or faster or restarts):
        return None
    changed = float(np.median(after[:width]))
    return sign(
        "jumps" if jumps else "changes",
        step=loss.step(place),
        noise=noise,
        loss_before=level,
        loss_after=changed,
        jump_to=changed if jumps else None,
        rate_before=rates[0] if odd_rate else None,
        rate_after=rates[1] if odd_rate else None,
        rate_factor=rates[1] / rates[0],
        count_before=loss.step(place - 1) if restarts else None,
        pace_of_weights=speed_up,
        speed_up=speed_up if faster else None,
    )


def _jumps(before: Floats, after: Floats, width: int, noise: float, level: float) -> bool:
    """Whether the level of the rows after is surely higher: a jump that lasts is seen by more rows
    where single ones are noisy."""
    after = after[:width]
    error = 1.25 * noise * (1 / len(before) + 1 / len(after)) ** 0.5
    jump = float(np.median(after)) - float(np.median(before))
    return len(after) == width and jump > max(limits.SURE_ERRORS * error, 0.05 * abs(level))


def _count_restarts(log: LogFeatures, place: int) -> bool:
    """Whether the step falls back to where the log began, though the weights are what they were."""
    steps, values, first = log.loss.series.steps, log.loss.values, log.first_loss
    if steps[place] > steps[: max(2, place // 20)].max():
        return False
    before = float(np.median(values[max(0, place - 10) : place]))
    after = float(np.median(values[place : place + 4]))
    lost = (1 - limits.MIN_GAIN_KEPT) * (first - before)
    return before < first and after < before + lost


def _speed_up_of_weights(log: LogFeatures, place: int) -> float:
    """Median change of the weight norm from row to row after a resume over the largest before it;
    or how far it is at once from what it was at that step, over the same."""
    norms, row = log.recording["weight_norm"].finite, int(log.loss.series.rows[place])
    at = int(np.searchsorted(norms.rows, row))
    before = np.abs(np.diff(norms.values[max(0, at - 15) : at]))
    after = np.abs(np.diff(norms.values[at : at + 10]))
    if len(before) < 8 or len(after) < 6 or before.max() <= 0:
        return 1.0
    same = np.flatnonzero(norms.steps[:at] <= norms.steps[at])
    off = abs(norms.values[at] - norms.values[same[-1]]) / 2 if len(same) else 0.0
    return float(max(np.median(after), off) / before.max())


def _rate_step(log: LogFeatures, place: int) -> tuple[tuple[float, float], bool]:
    """Rates before and after a row, and whether their factor is far above those that the schedule
    had from row to row until then."""
    rows = log.loss.series.rows[max(0, place - 6) : place + 1]
    known = [log.recording.value_in_row("lr", int(row)) or math.nan for row in rows]
    rates = np.array(known)
    if not (np.isfinite(rates).all() and (rates > 0).all()):
        return (1.0, 1.0), False
    factors = np.abs(np.diff(np.log(rates)))
    odd = max(math.log(limits.MIN_ODD_FACTOR_OF_RATE), 3 * float(factors[:-1].max()))
    return (float(rates[-2]), float(rates[-1])), bool(factors[-1] > odd)
