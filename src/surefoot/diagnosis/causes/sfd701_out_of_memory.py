"""SFD701: the run ended for lack of memory."""

from __future__ import annotations

import re

from surefoot.core.finding import Certainty, Severity
from surefoot.diagnosis.causes.base import Cause, CauseInfo, Verdict
from surefoot.diagnosis.signals import Signals

MEMORY = re.compile(
    r"out of memory|OutOfMemory|MemoryError|not enough memory|bad_alloc|\bOOM\b"
    r"|(?:cannot|unable to|failed to|could not) allocate",
    re.IGNORECASE,
)
"""What CUDA, the CPU's allocator (`not enough memory: you tried to allocate`), numpy, C++ and the
kernel say."""


ENDS = ("failure", "failed", "error", "crash", "crashed", "exception", "killed", "abort", "fatal")
"""What logs call the event of an end that was not wanted."""


class OutOfMemory(Cause):
    """The run ended for lack of memory."""

    info = CauseInfo(
        code="SFD701",
        slug="out-of-memory",
        severity=Severity.ERROR,
        certainty=Certainty.PROOF,
        title="The run ended for lack of memory.",
        observes="The error that the run ended with, and the memory that it had recorded.",
        why="Activations grow with batch and sequence length, optimizer states with the model."
        " What fits at first may fail at the longest batch, or at the first evaluation.",
        fix="A smaller micro-batch with more accumulation (same update); shorter sequences;"
        " recomputation of activations; bf16; sharded optimizer states. Then expandable segments"
        " against fragmentation.",
        source="https://docs.pytorch.org/docs/stable/notes/cuda.html (memory management)",
        needs=("events",),
    )

    def look(self, signals: Signals) -> Verdict | None:
        for event in reversed(signals.recording.events):
            text = f"{event.message} {event.data.get('type', '')}"
            if event.kind.lower() in ENDS and MEMORY.search(text):
                peak = signals.recording["memory_bytes"].finite.values
                seen = (
                    f" The highest that was recorded is {peak.max() / 2**30:.2f} GiB."
                    if len(peak)
                    else ""
                )
                return Verdict(
                    f"The run ended at step {event.step}: {event.message.strip()[:200]}.{seen}",
                    weight=0.99,
                    evidence={
                        "step": event.step,
                        "peak_bytes": float(peak.max()) if len(peak) else None,
                    },
                )
        return None
