"""The pass side of an update: how a window becomes gradients, on one rank or on several.

Everything is chosen here from the settings and the layout, once. Nothing is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from surefoot.assembly.task_layout import loads_of
from surefoot.config.sections import Settings
from surefoot.core.identity import identity
from surefoot.engine.evaluate import SumUp
from surefoot.engine.measure.device_clock import DeviceClock, TimedTask
from surefoot.engine.measure.forward_clock import ForwardClock
from surefoot.engine.passes import EnclosedPass, Pass, PlainPass, RankReduction
from surefoot.engine.pipeline_pass import PipelinePass, PipelineSums
from surefoot.memory.weights_on_host import WeightsOnHost, check_weights_on_host
from surefoot.numerics.clipping import global_norm, gradients_of, weight_norm
from surefoot.numerics.precision import Precision
from surefoot.parallel.collectives import HostSums, SharedBuffers
from surefoot.parallel.layout import LaidOut, Place
from surefoot.parallel.parts import ShardedNorm, local_gradients
from surefoot.tasks.routed import RouterLoads
from surefoot.tasks.task import Task


@dataclass(frozen=True)
class RankParts:
    """The parts of a pass that differ between one rank, whose are the defaults, and several."""

    run_pass: Pass
    weight_norm: Callable[[], Tensor]
    sum_over_ranks: Callable[[Mapping[str, float]], Mapping[str, float]] = identity
    gradients_of: Callable[[Sequence[Tensor]], list[Tensor]] = gradients_of
    global_norm: Callable[[Sequence[Tensor]], Tensor] = global_norm
    host_sums: HostSums | None = None
    """Where the ranks meet in each update; None for one rank."""
    sum_up: SumUp | None = None
    """How an evaluation runs where the layers lie on several ranks."""
    forward_seconds: Callable[[], float] = lambda: 0.0
    """Host time of all forwards so far, where a forward waits for no other rank."""


@dataclass(frozen=True)
class PassSide:
    """How a window becomes gradients, and what can be measured of it."""

    run_pass: Pass
    ranks: RankParts
    clock: DeviceClock | None
    """Of the device; None without events of its own."""
    loads: RouterLoads | None
    """Of the experts; None for a model without routers."""
    reshard: Callable[[], None]
    """Gives up sharded parameters that an evaluation has gathered."""
    has_whole_weights: bool
    """Whether each weight lies whole on this rank, and so can be measured by itself."""
    has_all_layers: bool
    """Whether all layers lie on this rank."""

    def device_milliseconds(self) -> dict[str, float] | None:
        """Where the time of a sampled update goes on the device; None without a clock."""
        return None if self.clock is None else self.clock.milliseconds()


def make_pass_side(
    model: nn.Module,
    task: Task,
    settings: Settings,
    precision: Precision,
    device: torch.device,
    laid_out: LaidOut,
    place: Place,
    parameters: Sequence[Tensor],
) -> PassSide:
    """Builds it for a model that is laid out; `parameters` are those that are trained."""
    is_staged = laid_out.pipeline is not None
    # Forwards and backwards of stages take turns: no event tells them apart.
    clock = DeviceClock(device) if device.type == "cuda" and not is_staged else None
    timed = task if clock is None else TimedTask(task, clock)
    ranks = make_rank_parts(laid_out, model, timed, precision, place, parameters)
    run_pass = ranks.run_pass
    if settings.memory.offload_parameters != "off":
        check_weights_on_host(device, place.has_whole_model)
        run_pass = EnclosedPass(run_pass, WeightsOnHost(model, device).away)
    return PassSide(
        run_pass=run_pass,
        ranks=ranks,
        clock=clock,
        loads=loads_of(task),
        reshard=laid_out.reshard_all,
        has_whole_weights=not (laid_out.is_sharded or is_staged),
        has_all_layers=not is_staged,
    )


def make_rank_parts(
    laid_out: LaidOut,
    model: nn.Module,
    task: Task,
    precision: Precision,
    place: Place,
    parameters: Sequence[Tensor],
) -> RankParts:
    """On one rank nothing is summed, and nothing is asked of anybody."""
    mesh = place.mesh
    if mesh is None:
        return RankParts(PlainPass(model, task, precision), lambda: weight_norm(parameters))
    share, host_sums = SharedBuffers(model, mesh).share, HostSums(mesh)
    of_ranks: dict[str, Any] = {"sum_over_ranks": host_sums, "host_sums": host_sums}
    forward = laid_out.forward
    reduction = RankReduction(forward, laid_out.sync, share, mesh.sum_over_items)
    if laid_out.pipeline is None and not laid_out.is_sharded:
        clocked = ForwardClock(task)
        return RankParts(
            PlainPass(forward, clocked, precision, reduction),
            lambda: weight_norm(parameters),
            forward_seconds=lambda: clocked.seconds,
            **of_ranks,
        )
    norm = ShardedNorm(parameters, mesh)
    of_ranks |= {"gradients_of": local_gradients, "global_norm": norm.of_gradients}
    if laid_out.pipeline is None:
        return RankParts(PlainPass(forward, task, precision, reduction), norm.of_values, **of_ranks)
    return RankParts(
        PipelinePass(laid_out.pipeline, task, precision, share, mesh.sum_over_items),
        norm.of_values,
        sum_up=PipelineSums(laid_out.pipeline, task, precision),
        **of_ranks,
    )
