"""Observes that global random streams are seeded or put back. Reads and draws nothing."""

from __future__ import annotations

import random
import sys
from typing import Any

import torch
from torch.utils.data import get_worker_info

from surefoot.sanitizer import events as ev
from surefoot.sanitizer.probe.patches import Patches
from surefoot.sanitizer.trace import Trace


def attach(patches: Patches) -> None:
    """Watches rng for as long as the patches are in place."""
    trace = patches.trace
    patches.around(torch, "manual_seed", _around(trace, "torch"), rebind=True)
    patches.around(torch.random, "manual_seed", _around(trace, "torch"))
    patches.around(torch, "set_rng_state", _put_back(trace), rebind=True)
    patches.around(torch.random, "set_rng_state", _put_back(trace))
    patches.set(random, "seed", _forward(trace, "random", random.seed))
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        patches.set(numpy.random, "seed", _forward(trace, "numpy", numpy.random.seed))


def _around(trace: Trace, library: str) -> Any:
    def seed(original: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        trace.safely(_seeded, trace, library, args[0] if args else kwargs.get("seed"))
        return result

    return seed


def _put_back(trace: Trace) -> Any:
    def put_back(original: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        trace.safely(_was_put_back, trace)
        return result

    return put_back


def _forward(trace: Trace, library: str, original: Any) -> Any:
    # `random.seed` and `numpy.random.seed` are bound methods: no attribute to wrap in place.
    def seed(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        trace.safely(_seeded, trace, library, args[0] if args else None)
        return result

    return seed


def _seeded(trace: Trace, library: str, seed: object) -> None:
    if get_worker_info() is None:
        trace.emit(ev.Seeded(**trace.here(), library=library, seed=seed))


def _was_put_back(trace: Trace) -> None:
    trace.emit(ev.StreamPutBack(**trace.here()))
