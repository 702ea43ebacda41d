"""What `auto` means for compilation and for the memory layout of convolutions. Compiles nothing.

A choice depends on the model, the device and the length of the run alone, and a run that is resumed
keeps the one that it began with, so that its numbers go on.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from surefoot.config.sections import Settings
from surefoot.core.counting import Pace
from surefoot.core.peaks import dense_peak
from surefoot.core.schedules import Undecided
from surefoot.numerics.precision import choose_precision
from surefoot.parallel.compilation import Extent, blocks_to_compile
from surefoot.parallel.layout import Place

MIN_UPDATES_TO_COMPILE = 1000
"""A compilation takes 10 to 30 s and saves a third of an update or less: of a GPT-2 of 124 million
parameters on an H200, 16 of 50 ms."""
MIN_SECONDS_TO_COMPILE = 60.0
"""Estimated length of a run that is worth a compilation, where its operations are known."""
UNCOMPILED_UTILIZATION = 0.35
"""Share of a device's peak that uncompiled training reaches, for that estimate."""
MIN_UPDATE_SECONDS = 0.002
"""Time that the host needs to launch one uncompiled update of a small model, likewise."""


@dataclass(frozen=True)
class Compilation:
    """What of a model is compiled, and how convolutions lie in memory."""

    extent: Extent
    channels_last: bool
    reason: str
    """Why, where the settings left it to be chosen; empty where they did not."""

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Compilation:
        return cls(data["extent"], bool(data["channels_last"]), str(data["reason"]))

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    def settle(self, settings: Settings) -> Settings:
        """The settings with this choice in the place of `auto`."""
        layout = "on" if self.channels_last else "off"
        train = settings.train.model_copy(update={"compile": self.extent, "channels_last": layout})
        return settings.model_copy(update={"train": train})


BEFORE_THERE_WAS_A_CHOICE = Compilation("off", False, "as the run began")


def choose_compilation(
    model: nn.Module,
    settings: Settings,
    device: torch.device,
    place: Place,
    pace: Pace,
    horizon: int | Undecided,
) -> Compilation:
    """The choice for a run that begins.

    Args:
        horizon: updates of the whole run.
    """
    train = settings.train
    if train.compile == "auto":
        extent, reason = _choose_extent(model, settings, device, place, pace, horizon)
    else:
        extent, reason = train.compile, ""
    channels_last = train.channels_last == "on" or (
        train.channels_last == "auto"
        and device.type == "cuda"
        and place.sizes.has_whole_weights
        and any(isinstance(module, nn.Conv2d) for module in model.modules())
    )
    return Compilation(extent, channels_last, reason)


def keep_compilation(settings: Settings, begun_with: Compilation) -> Compilation:
    """The choice for a run that goes on: what it began with, unless the settings say otherwise."""
    train = settings.train
    extent = begun_with.extent if train.compile == "auto" else train.compile
    by_setting = {"on": True, "off": False}
    channels_last = by_setting.get(train.channels_last, begun_with.channels_last)
    return Compilation(extent, channels_last, begun_with.reason)


def _choose_extent(
    model: nn.Module,
    settings: Settings,
    device: torch.device,
    place: Place,
    pace: Pace,
    horizon: int | Undecided,
) -> tuple[Extent, str]:
    memory = settings.memory
    if device.type != "cuda":
        return "off", f"the device is {device.type}"
    if importlib.util.find_spec("triton") is None:
        return "off", "triton is not installed"
    if memory.recompute == "budget":
        return "off", "memory.recompute is budget"
    if memory.offload_activations != "off" or memory.offload_parameters != "off":
        return "off", "weights or activations are kept on the host"
    if place.sizes.pipeline > 1:
        return "off", "the layers are spread over the stages of a pipeline"
    is_long, length = _is_long(settings, device, place, pace, horizon)
    if not is_long:
        return "off", f"{length}: too short to pay for a compilation"
    if blocks := blocks_to_compile(model):
        return "blocks", f"{length}, {len(blocks)} layers that are built alike"
    if memory.loss == "chunked":
        return "off", "memory.loss is chunked, and the model has no layers that are built alike"
    if not place.sizes.has_whole_weights:
        return "off", "the weights are sharded, and the model has no layers that are built alike"
    return "whole", length


def _is_long(
    settings: Settings,
    device: torch.device,
    place: Place,
    pace: Pace,
    horizon: int | Undecided,
) -> tuple[bool, str]:
    """Whether a run is long enough to pay for a compilation, and how long it is."""
    if not isinstance(horizon, int):
        return True, f"a run of {settings.train.horizon}"
    precision = choose_precision(settings.precision.dtype, device)
    peak = dense_peak(torch.cuda.get_device_name(device), precision.name)
    if peak is None or pace.flops_per_sample is None:
        return horizon >= MIN_UPDATES_TO_COMPILE, f"a run of {horizon} updates"
    operations = pace.samples_per_update * pace.flops_per_sample / place.ranks.size
    seconds = horizon * max(MIN_UPDATE_SECONDS, operations / (peak * UNCOMPILED_UTILIZATION))
    return seconds >= MIN_SECONDS_TO_COMPILE, f"a run of about {seconds:.0f} s uncompiled"
