"""What a run with parts of somebody else's cannot promise, in sentences for its record and notes.

Everything of our own is proven by tests; of a part that comes from outside only its calls are.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from surefoot.assembly.optimizer_side import bound_of
from surefoot.assembly.run_parts import Assembly
from surefoot.config.sections import OwnOptimizerSection, OwnScheduleSection
from surefoot.core.doors import GIVEN, OURS, Door, label_of
from surefoot.data.order import BatchPlan
from surefoot.data.samplers import TorchOrder
from surefoot.optim.update import SkipKind


def own_parts(assembly: Assembly) -> dict[str, str]:
    """Each part that is not ours, and what is not promised of it; empty where all are ours."""
    settings = assembly.settings
    sections: dict[str, tuple[Door, Any]] = {
        "optimizer": (Door.OPTIMIZERS, settings.optimizer),
        "schedule": (Door.SCHEDULES, settings.schedule),
        "clip": (Door.CLIPS, settings.train.clip),
        "sampler": (Door.SAMPLERS, settings.sampler),
    }
    limits = {
        "optimizer": _of_optimizer,
        "schedule": _of_schedule,
        "clip": _of_clip,
        "sampler": _of_sampler,
    }
    return {
        name: "; ".join([label_of(door, section), *limits[name](assembly)])
        for name, (door, section) in sections.items()
        if section.kind not in OURS[door]
    }


def _of_optimizer(assembly: Assembly) -> Iterator[str]:
    if not isinstance(assembly.settings.optimizer, OwnOptimizerSection):
        return
    yield (
        "a checkpoint holds its `state`, its group values and what its state_dict adds: "
        "`surefoot check RECIPE --only resume` proves that this is all"
    )
    if assembly.trainable.optimizing.optimizer.skips is SkipKind.ON_HOST:
        yield (
            "each update waits once for its flag on the host (one sync): only torch's fused "
            "optimizers skip on the device"
        )
    if not assembly.trainable.passing.has_whole_weights:
        yield "it steps what lies on this rank: a rule over whole matrices or all weights differs"


def _of_schedule(assembly: Assembly) -> Iterator[str]:
    section = assembly.settings.schedule
    if not isinstance(section, OwnScheduleSection):
        return
    if section.kind == GIVEN:
        yield "a resume compares its name alone: that it is the same function is not checked"
    else:
        yield "a resume with another horizon is refused where updates that are done would differ"


def _of_clip(assembly: Assembly) -> Iterator[str]:
    if bound_of(assembly.trainable.optimizing.clip) == float("inf"):
        yield "it names no max_norm: `clipped` in the log is always false"
    if not assembly.trainable.passing.has_whole_weights:
        yield "it sees the gradients that lie on this rank, beside the norm of all"


def _of_sampler(assembly: Assembly) -> Iterator[str]:
    plan = assembly.plan
    if not isinstance(plan, BatchPlan):
        return
    if isinstance(plan.order, TorchOrder):
        yield plan.order.promise
    yield "a resume compares the first samples of two epochs"
