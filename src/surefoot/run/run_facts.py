"""What a run is, as plain values: for its record, its checkpoints, the console and the disk.

It is read off the parts of a run once, before it begins; nothing is changed.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch

from surefoot.assembly.deciding import deciding_fields, deciding_metric
from surefoot.assembly.material import Prepared
from surefoot.assembly.run_parts import Assembly
from surefoot.config.load import Resolved
from surefoot.config.sections import Settings
from surefoot.core.schedules import Undecided
from surefoot.data.order import SHUFFLED, BatchPlan, order_digest
from surefoot.numerics.modes import mode_sensitive_modules
from surefoot.observe.record import RunRecord, collect_record
from surefoot.observe.terminal.view import Unit
from surefoot.parallel.sizes import ParameterSizes
from surefoot.run.edits import CONFIG_DIGEST, SETTINGS_KEY, digest_of_config
from surefoot.run.own_parts import own_parts
from surefoot.run.resume_rules import BEGUN_FOR_KEY, COMPILATION_KEY, ORDER_KEY
from surefoot.tasks.task import split_dependence

RECORDER = ("TORCH_FR_", "TORCH_NCCL_")
CHECKPOINT_OVERHEAD_BYTES = 1 << 20


@dataclass(frozen=True)
class RunDescription:
    """What a run is, before it begins."""

    name: str
    settings: Settings
    about: Mapping[str, Any]
    """What each checkpoint says of its run."""
    data: Mapping[str, Any]
    """Fingerprints and facts of the data, for the record."""
    facts: Mapping[str, Any]
    """What the record says besides."""
    size: ParameterSizes
    """Of the whole model, on whichever ranks its layers lie."""
    end: tuple[float, Unit]
    """Where it ends, in updates where that is known before."""
    counts_tokens: bool
    identity: Mapping[str, Any] = field(default_factory=dict)
    """What tells its experiment apart beside settings and data."""

    def needed_bytes(self, *, resuming: bool = False) -> int:
        """What the checkpoints take at most, one more than are kept while one is written.

        A resumed run has most of them already, and deletes one for each that it writes; one that
        saves at its end alone has no others.
        """
        one = self.size.num_bytes + 3 * 4 * self.size.num_trained + CHECKPOINT_OVERHEAD_BYTES
        section = self.settings.checkpoint
        saves_once = section.every == "end" and section.ephemeral_every == "never"
        return one * (2 if resuming or saves_once else section.keep + section.keep_best + 2)


def fingerprints_of(prepared: Prepared, assembly: Assembly) -> dict[str, str]:
    """Fingerprint of each data set, and of the order of the samples where it is a sampler's."""
    found = prepared.fingerprints()
    if isinstance(assembly.plan, BatchPlan) and assembly.plan.order is not SHUFFLED:
        found[ORDER_KEY] = order_digest(assembly.plan)
    return found


def describe(
    name: str,
    resolved: Resolved[Any],
    prepared: Prepared,
    assembly: Assembly,
    identity: Mapping[str, Any] = MappingProxyType({}),
) -> RunDescription:
    """Reads the description of a run off its parts."""
    trainable, settings = assembly.trainable, assembly.settings
    mesh = {axis: size for axis, size, _ in assembly.place.sizes.table()}
    fingerprints, size = fingerprints_of(prepared, assembly), parameter_sizes(assembly)
    horizon, samples = assembly.horizon_updates, assembly.pace.samples_per_update
    given: Any = settings.train.horizon
    about = {
        "config_hash": resolved.digest,
        SETTINGS_KEY: resolved.as_dict(),
        CONFIG_DIGEST: digest_of_config(resolved),
        "data": fingerprints,
        "architecture": prepared.architecture,
        "torch": torch.__version__,
        "ranks": assembly.place.ranks.size,
        "mesh": mesh,
        "samples_per_update": samples,
        BEGUN_FOR_KEY: assembly.begun_for,
        COMPILATION_KEY: assembly.compilation.as_json(),
        "device": trainable.device.type,
    }
    facts = {
        "device": str(trainable.device),
        "mesh": mesh,
        "precision": {"name": trainable.precision.name, "reason": trainable.precision.reason},
        "compilation": assembly.compilation.as_json(),
        "optimizer_kernel": trainable.optimizing.optimizer.kernel,
        "skips": trainable.optimizing.optimizer.skips.value,
        "parameters": size.num_elements,
        "trainable_parameters": size.num_trained,
        "samples_per_update": samples,
        "tokens_per_sample": assembly.pace.tokens_per_sample,
        "horizon_updates": "undecided" if isinstance(horizon, Undecided) else horizon,
        "deciding_metric": deciding_fields(deciding_metric(settings, assembly.material.task)),
        "exactness": exactness(assembly),
        "identity": dict(identity),
        "decay_disagreements": [row.name for row in trainable.optimizing.ledger.disagreements],
    }
    if own := own_parts(assembly):
        facts["own_parts"] = own
    return RunDescription(
        name=name,
        settings=settings,
        about=about,
        data={"fingerprints": fingerprints, **prepared.facts},
        facts=facts,
        size=size,
        end=(float(horizon), "steps")
        if isinstance(horizon, int)
        else (float(given.value), given.kind),
        counts_tokens=trainable.counts_tokens,
        identity=identity,
    )


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
        "data_order": assembly.plan.order_promise,
        "resume": "the same weights, samples and random numbers, each update once",
    }


def make_record(
    described: RunDescription,
    memory: Mapping[str, int],
    resumed: Mapping[str, object] | None = None,
) -> RunRecord:
    """Everything that another engineer needs to understand or repeat the run.

    Args:
        described: the run.
        memory: bytes of weights, gradients and optimizer state on this rank.
        resumed: where it goes on, with which tier and changes; None where it begins.
    """
    recorder = {name: value for name, value in os.environ.items() if name.startswith(RECORDER)}
    return collect_record(
        name=described.name,
        seed=described.settings.seed,
        data=described.data,
        extra={
            **described.facts,
            "flight_recorder": recorder,
            "memory": memory,
            "resumed": resumed,
        },
    )
