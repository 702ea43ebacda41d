"""Checks that a checkpoint holds everything that a resume needs, without loading it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields

from surefoot.state.manifest import Manifest
from surefoot.state.run_state import Progress, RunState
from surefoot.state.tree import RANKS_KEY, Snapshot, tensors_named

ABOUT_THE_RUN = ("config_hash", "data", "torch", "ranks")
PARTS = tuple(f.name for f in fields(RunState) if f.name not in ("device", "rank", "layers"))
"""The parts of a run's state, as `RunState` lists them."""


def missing_items(manifest: Manifest, snapshot: Snapshot) -> list[str]:
    """Names of the missing items; empty for a complete checkpoint.

    For weights alone (kind `weights`) only the model is needed.
    """
    values = snapshot.values if isinstance(snapshot.values, Mapping) else {}
    missing = [
        f"the tensor {name}" for name in tensors_named(values) if name not in manifest.tensors
    ]
    if manifest.kind != "resumable":
        return missing + [part for part in ("model",) if part not in values]
    missing += [part for part in (*PARTS, "log_offsets") if part not in values]
    progress = values.get("progress", {})
    missing += [f"progress.{f.name}" for f in fields(Progress) if f.name not in progress]
    missing += [f"about.{name}" for name in ABOUT_THE_RUN if name not in manifest.about]
    of_ranks = values.get(RANKS_KEY, {})
    for rank in range(int(manifest.about.get("ranks", 1))):
        if "rng" not in of_ranks.get(str(rank), {}):
            missing.append(f"random state of rank {rank}")
    return missing
