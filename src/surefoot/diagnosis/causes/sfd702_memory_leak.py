"""SFD702: memory grows with every update."""

from __future__ import annotations

import numpy as np

from surefoot.core.finding import Certainty, Severity
from surefoot.diagnosis.causes.base import Cause, CauseInfo, Verdict
from surefoot.diagnosis.curve import Curve, straightness
from surefoot.diagnosis.signals import Signals

GROWN = 0.02


class MemoryLeak(Cause):
    """Memory grows with every update."""

    info = CauseInfo(
        code="SFD702",
        slug="memory-leak",
        severity=Severity.WARNING,
        certainty=Certainty.STRONG,
        title="Memory grows with every update.",
        observes="The recorded memory of the device, or of the host, after its first fifth: whether"
        " it rises in a straight line to the end. Quiet for a rise that settles.",
        why="Something keeps the graph of each update alive: a loss that was appended or summed up"
        " without .detach(), a hook that collects outputs.",
        fix="Keep numbers, not tensors: loss.detach() or .item() once in a while; look for lists"
        " that grow and for retain_graph=True.",
        source="https://docs.pytorch.org/docs/stable/notes/faq.html (memory usage grows), audit"
        " rule SF701",
        needs=("memory_bytes or host_memory_bytes",),
    )

    def look(self, signals: Signals) -> Verdict | None:
        for name in ("memory_bytes", "host_memory_bytes"):
            found = self._grows(Curve(signals.recording[name]), signals.recording.last_step)
            if found is not None:
                return found
        return None

    def _grows(self, memory: Curve, last_step: int) -> Verdict | None:
        if len(memory) < 30:
            return None
        late = memory.smooth[len(memory) // 5 :]
        line = straightness(late)
        quarter = len(late) // 4
        parts = [float(np.median(late[i * quarter : (i + 1) * quarter])) for i in range(4)]
        rises = np.diff(parts)
        grown = (parts[-1] - parts[0]) / max(parts[0], 1.0)
        if line < 0.97 or grown < GROWN or rises.min() < 0.4 * rises.mean():
            return None
        per_update = (parts[-1] - parts[0]) / (0.75 * max(1, last_step) * 0.8)
        return Verdict(
            f"Memory grows in a straight line, from {parts[0] / 2**20:.0f} to"
            f" {parts[-1] / 2**20:.0f}"
            f" MiB, by about {per_update / 2**10:.0f} KiB an update.",
            weight=0.82,
            evidence={
                "first_bytes": parts[0],
                "last_bytes": parts[-1],
                "bytes_per_update": per_update,
            },
        )
