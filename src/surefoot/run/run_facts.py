"""What a run is, in words and numbers: for its record, its checkpoints and the disk it needs.

It reads the parts of a run and changes none of them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch

from surefoot.assembly.deciding import deciding_fields, deciding_metric
from surefoot.assembly.material import Prepared
from surefoot.assembly.run_parts import Assembly
from surefoot.core.schedules import Undecided
from surefoot.data.sources.stream import StreamPlan
from surefoot.numerics.modes import mode_sensitive_modules
from surefoot.observe.record import RunRecord, collect_record
from surefoot.parallel.sizes import ParameterSizes
from surefoot.run.memory_shortage import memory_table
from surefoot.run.resume_rules import BEGUN_FOR_KEY
from surefoot.tasks.task import split_dependence

RECORDER = ("TORCH_FR_", "TORCH_NCCL_")
CHECKPOINT_OVERHEAD_BYTES = 1 << 20


def make_about(config_hash: str, prepared: Prepared, assembly: Assembly) -> dict[str, Any]:
    """What each checkpoint says of its run."""
    return {
        "config_hash": config_hash,
        "data": prepared.fingerprints(),
        "architecture": prepared.architecture,
        "torch": torch.__version__,
        "ranks": assembly.place.ranks.size,
        "mesh": {axis: size for axis, size, _ in assembly.place.sizes.table()},
        "samples_per_update": assembly.pace.samples_per_update,
        BEGUN_FOR_KEY: assembly.begun_for,
        "device": assembly.trainable.device.type,
    }


def needed_bytes(assembly: Assembly, *, resuming: bool = False) -> int:
    """What the checkpoints of a run take at most, one more than are kept while one is written.

    A resumed run has most of them already, and deletes one for each that it writes; one that saves
    at its end alone has no others.
    """
    size = parameter_sizes(assembly)
    one = size.num_bytes + 3 * 4 * size.num_trained + CHECKPOINT_OVERHEAD_BYTES
    section = assembly.settings.checkpoint
    saves_once = section.every == "end" and section.ephemeral_every == "never"
    return one * (2 if resuming or saves_once else section.keep + section.keep_best + 2)


def parameter_sizes(assembly: Assembly) -> ParameterSizes:
    """Of the whole model, on whichever ranks its layers lie."""
    here = ParameterSizes.of(assembly.material.model)
    return here + assembly.trainable.state.layers.size_elsewhere


def exactness(assembly: Assembly) -> dict[str, object]:
    """What keeps the numbers from being those of another split, and what a resume promises."""
    model = assembly.material.model
    modules = [
        f"{m.name or '(model)'}: {m.kind}, {m.in_train}" for m in mode_sensitive_modules(model)
    ]
    for name, module in model.named_modules():
        if why := getattr(module, "depends_on_split", ""):
            modules.append(f"{name or '(model)'}: {type(module).__name__}, {why}")
    terms = split_dependence(assembly.evaluator.task)
    return {
        "depends_on_the_split": [
            *modules,
            *(f"loss: term {term}, {why}" for term, why in terms.items()),
            *([f"loss: {assembly.coupling}"] if assembly.coupling else ()),
        ],
        "data_order": (
            "the stream's own state"
            if isinstance(assembly.plan, StreamPlan)
            else "a function of seed, epoch and position"
        ),
        "resume": "the same weights, samples and random numbers, each update once",
    }


def make_record(
    name: str,
    prepared: Prepared,
    assembly: Assembly,
    resumed: Mapping[str, object] | None = None,
) -> RunRecord:
    """Everything that another engineer needs to understand or repeat the run.

    Args:
        name: of the run.
        prepared: what it was made from.
        assembly: its parts.
        resumed: where it goes on, with which tier and changes; None where it begins.
    """
    trainable = assembly.trainable
    deciding = deciding_metric(assembly.settings, assembly.material.task)
    return collect_record(
        name=name,
        seed=assembly.settings.seed,
        data={"fingerprints": prepared.fingerprints(), **prepared.facts},
        extra={
            "device": str(trainable.device),
            "flight_recorder": {n: v for n, v in os.environ.items() if n.startswith(RECORDER)},
            "mesh": {axis: size for axis, size, _ in assembly.place.sizes.table()},
            "precision": {"name": trainable.precision.name, "reason": trainable.precision.reason},
            "optimizer_kernel": trainable.optimizing.optimizer.kernel,
            "skips": trainable.optimizing.optimizer.skips.value,
            "parameters": parameter_sizes(assembly).num_elements,
            "trainable_parameters": parameter_sizes(assembly).num_trained,
            "samples_per_update": assembly.pace.samples_per_update,
            "tokens_per_sample": assembly.pace.tokens_per_sample,
            "horizon_updates": (
                "undecided"
                if isinstance(assembly.horizon_updates, Undecided)
                else assembly.horizon_updates
            ),
            "deciding_metric": deciding_fields(deciding),
            "memory": memory_table(assembly),
            "exactness": exactness(assembly),
            "resumed": resumed,
            "decay_disagreements": [row.name for row in trainable.optimizing.ledger.disagreements],
        },
    )
