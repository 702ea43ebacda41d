"""What the rules about ranks share: digests of gradients and weights at sampled updates.

No communication: each rank writes down its own, and the audit compares them at the end.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from surefoot.sanitizer import events as ev
from surefoot.sanitizer.frames import Site
from surefoot.sanitizer.state import OptimizerState
from surefoot.sanitizer.trace import Trace

FIRST = 6
SAMPLE = 64
LEAST_UPDATES = 2


def sampled(n: int) -> bool:
    """Whether update `n` (from 1) is one of those whose digests are taken."""
    return n <= FIRST or n & (n - 1) == 0


class Checksums:
    """Digests of one rank, for rules that hand on the events."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.gradients: dict[int, dict[int, str]] = {}
        self.weights: dict[int, dict[int, str]] = {}
        self.replicates = False
        """Whether this process takes part in data parallelism."""
        self.wrapped_forwards = 0
        self.unsynced_forwards = 0
        self.places: dict[int, Site] = {}

    def wrapped(self) -> None:
        self.replicates = True

    def collective(self, event: ev.Collective) -> None:
        self.replicates = self.replicates or event.on_gradient

    def forward(self, event: ev.ForwardEnd) -> None:
        wants_sync = getattr(event.module, "require_backward_grad_sync", None)
        if wants_sync is not None and event.grad_enabled:
            self.wrapped_forwards += 1
            self.unsynced_forwards += not wants_sync

    def step_begin(self, event: ev.StepBegin) -> None:
        if self._watched(event.optimizer, event.optimizer.steps + 1):
            kept = self.gradients.setdefault(event.optimizer.key, {})
            kept[event.optimizer.steps + 1] = self._digest(event.optimizer, gradients=True)
            self.places[event.optimizer.key] = event.site

    def step_end(self, event: ev.StepEnd) -> None:
        if self._watched(event.optimizer, event.optimizer.steps):
            kept = self.weights.setdefault(event.optimizer.key, {})
            kept[event.optimizer.steps] = self._digest(event.optimizer, gradients=False)

    def _watched(self, optimizer: OptimizerState, n: int) -> bool:
        return sampled(n) and dist.is_available() and dist.is_initialized()

    def _digest(self, optimizer: OptimizerState, *, gradients: bool) -> str:
        digest = hashlib.blake2b(digest_size=8)
        for state in optimizer.parameters:
            tensor = state.ref()
            value = tensor if tensor is None or not gradients else tensor.grad
            if value is None or type(value) not in (torch.Tensor, torch.nn.Parameter):
                # Shards (DTensor) differ by design.
                continue
            flat = value.detach().reshape(-1) if not value.is_sparse else value.coalesce().values()
            flat = flat.reshape(-1)
            sample = flat[:: max(1, flat.numel() // SAMPLE)][:SAMPLE].float().cpu()
            digest.update(sample.contiguous().numpy().tobytes())
        return digest.hexdigest()

    def facts(self) -> Any:
        if not self.replicates or not self.gradients:
            return None
        return {
            "gradients": {
                str(k): {str(n): d for n, d in v.items()} for k, v in self.gradients.items()
            },
            "weights": {str(k): {str(n): d for n, d in v.items()} for k, v in self.weights.items()},
            "places": {str(k): list(place) for k, place in self.places.items()},
            "forwards": self.wrapped_forwards,
            "unsynced": self.unsynced_forwards,
        }


def differing(facts: Mapping[int, Any], kind: str) -> dict[str, tuple[int, int]]:
    """Per optimizer: at how many of the sampled updates the ranks' digests differ."""
    found = {}
    for key in set.intersection(*(set(f[kind]) for f in facts.values())):
        tables = [f[kind][key] for f in facts.values()]
        common = set.intersection(*(set(table) for table in tables))
        apart = sum(1 for n in common if len({table[n] for table in tables}) > 1)
        found[key] = apart, len(common)
    return found


def unsynced(facts: Mapping[int, Any]) -> bool:
    """Whether nearly every wrapped forward ran with gradient synchronisation off."""
    forwards = sum(f["forwards"] for f in facts.values())
    off = sum(f["unsynced"] for f in facts.values())
    return forwards > 0 and off >= 0.9 * forwards
