"""Rules of memory savings: which combine, and which are not offered."""

from __future__ import annotations

from collections.abc import Iterator

from surefoot.config.rules.rule import Rule, broken
from surefoot.config.sections.memory import MemorySection
from surefoot.config.sections.run import GuardSection, PrecisionSection, TrainSection
from surefoot.core.errors import Violation

COMPILED = ("blocks", "whole")
"""Of `train.compile`; `auto` compiles nothing that does not go with the rest."""


def nothing_goes_to_a_disk(memory: MemorySection) -> Iterator[Violation]:
    """torch has no such path, and a drive is slower than recomputation."""
    if memory.offload_activations == "nvme":
        yield broken(
            "memory.offload_activations",
            "offload to a drive is not supported: torch has no path for it, every update would "
            "write and read everything at a few GB/s, and drives wear out",
            "use memory.offload_activations=cpu, memory.recompute=blocks, or parallel.shard",
        )


def one_way_to_keep_a_block(memory: MemorySection, train: TrainSection) -> Iterator[Violation]:
    """What is recomputed is not kept, and compiled blocks choose what they keep."""
    if memory.recompute == "budget" and train.compile in COMPILED:
        yield broken(
            "memory.recompute",
            f"a budget needs to observe saved activations, and train.compile is {train.compile}",
            "use train.compile=off, or memory.recompute=blocks with memory.recompute_every",
        )
    if memory.offload_activations == "off":
        return
    if memory.recompute != "none":
        yield broken(
            "memory.offload_activations",
            f"keeps activations on the host, and memory.recompute is {memory.recompute}, which "
            "does not keep them",
            "use one of the two",
        )
    if train.compile in COMPILED:
        yield broken(
            "memory.offload_activations",
            f"needs to observe saved activations, and train.compile is {train.compile}",
            "use train.compile=off, or memory.recompute=blocks",
        )


def weights_come_and_go_uncompiled(
    memory: MemorySection, train: TrainSection
) -> Iterator[Violation]:
    """Compiled code expects weights at fixed addresses."""
    if memory.offload_parameters == "cpu" and train.compile in COMPILED:
        yield broken(
            "memory.offload_parameters",
            f"brings each block's weights when it is called, and train.compile is {train.compile}",
            "use train.compile=off, or parallel.shard",
        )


def the_optimizer_steps_after_the_backward(
    memory: MemorySection, train: TrainSection, precision: PrecisionSection, guard: GuardSection
) -> Iterator[Violation]:
    """A step in the backward would come before the norm and the finite flag are known."""
    if not memory.optimizer_in_backward:
        return
    against = [
        f"{name} = {value}"
        for name, value, is_against in (
            ("train.clip_norm", train.clip_norm, train.clip_norm != "off"),
            ("train.accumulation", train.accumulation, train.accumulation > 1),
            ("precision.dtype", precision.dtype, precision.dtype == "fp16"),
            ("guard.non_finite", guard.non_finite, guard.non_finite == "skip"),
            ("guard.spikes", guard.spikes, guard.spikes != "log"),
        )
        if is_against
    ]
    here = f"; here {', '.join(against)}" if against else ""
    yield broken(
        "memory.optimizer_in_backward",
        "an update is applied once its gradient norm is known and finite, which is after the "
        "backward: clipping, accumulation, a loss scale and skipping all need it" + here,
        "leave it out; memory.recompute=blocks or parallel.shard save memory",
    )


RULES: tuple[Rule, ...] = (
    nothing_goes_to_a_disk,
    one_way_to_keep_a_block,
    weights_come_and_go_uncompiled,
    the_optimizer_steps_after_the_backward,
)
