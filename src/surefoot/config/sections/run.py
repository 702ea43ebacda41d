"""How a run goes: length, batches, precision, evaluation, checkpoints, guard, log."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from surefoot.config.fields import (
    AsInTraining,
    ClipNorm,
    Duration,
    EveryEpoch,
    EveryOrEnd,
    EveryOrNever,
    EverySteps,
    Horizon,
    LossScale,
    NotNegative,
    NotNegativeNumber,
    Section,
    Text,
    Whole,
)
from surefoot.config.sections.parts import ClipSection, SinkSection
from surefoot.core.units import Seconds, Steps


class TrainSection(Section):
    """The length of the run and the shape of an update."""

    horizon: Horizon
    micro_batch: Whole
    """Samples of one forward and backward on one rank."""
    accumulation: Whole = 1
    """Window length: micro-batches of one update on one rank."""
    clip_norm: ClipNorm = 1.0
    clip: ClipSection = ClipSection(kind="norm")
    """How; a clip of one's own that has a `max_norm` is given `clip_norm`."""
    compile: Literal["off", "blocks", "whole"] = "off"
    short_batch: Literal["keep", "drop"] = "keep"
    """What happens to the last, short update of an epoch."""


class PrecisionSection(Section):
    """Number formats of the forward and backward."""

    dtype: Literal["auto", "fp32", "tf32", "bf16", "fp16"] = "auto"
    loss_scale: LossScale = "dynamic"
    """For fp16 alone: `dynamic`, or a number that stays."""


class LoaderSection(Section):
    """How batches are fetched; changes nothing about which."""

    workers: NotNegative = 0
    pin_memory: Literal["auto", "on", "off"] = "auto"
    prefetch: Whole = 2
    """Batches that each worker keeps ready."""
    deadline: Duration = Seconds(120)
    """How long a batch may take before its worker is reported as stuck."""


class EvaluateSection(Section):
    """When and on which weights to evaluate. A run that evaluates at all does so at its end too."""

    every: EveryEpoch = "epoch"
    micro_batch: AsInTraining = "as-in-training"
    weights: Literal["raw", "ema"] = "raw"


class CheckpointSection(Section):
    """When to save. A run always saves at its end."""

    every: EveryOrEnd = Steps(1000)
    mode: Literal["sync", "async"] = "sync"
    """`async` copies the state to host memory and writes it while the training goes on."""
    keep: Whole = 3
    """How many of the latest checkpoints stay."""
    keep_best: Whole = 1
    """How many of the best ones by the deciding metric stay."""
    keep_every: EverySteps = "never"
    """Checkpoints at multiples of this stay for ever."""
    ephemeral_every: EveryOrNever = "never"
    """In between, one that only stays until the next: for machines that may be taken away."""
    on_full: Literal["continue", "stop"] = "continue"
    """Whether a disk that is full or fails pauses saving, loudly, or ends the run."""


class GuardSection(Section):
    """What happens when a loss or gradient is NaN or infinite, or a spike."""

    non_finite: Literal["stop", "skip"] = "stop"
    skip_budget: Whole = 10
    """Updates that `skip` may skip before the run stops."""
    spikes: Literal["log", "skip", "roll-back"] = "log"
    """A spike is told; or an update with a spike of its gradient norm is not applied; or the run
    goes back to before a spike and leaves data out."""
    spike_budget: Whole = 10
    """Spikes that may be skipped or rolled back before the run stops."""
    roll_back_updates: Whole = 100
    """Updates before the spike that `roll-back` undoes with it."""
    leave_out_windows: Whole = 200
    """Windows of data that are left out then: those of the undone updates and the next ones."""
    deadline: Duration = Seconds(600)
    """Where nothing has happened for so long, the stacks of the process are written down."""
    restarts_without_progress: Whole = 3
    """A run that was resumed so often since its last new checkpoint is not resumed again."""
    compare_ranks_every: EverySteps = Steps(500)
    """How often ranks compare the bits of weights that are held twice, and their pace."""


class EmaOffSection(Section):
    """No moving average."""

    kind: Literal["off"] = "off"


class EmaOnSection(Section):
    """An exponential moving average of the weights."""

    kind: Literal["on"]
    decay: Annotated[float, Field(gt=0, lt=1)] = 0.999


EmaSection = Annotated[EmaOffSection | EmaOnSection, Field(discriminator="kind")]


class EarlyStoppingOffSection(Section):
    """The run goes on to its horizon."""

    kind: Literal["off"] = "off"


class EarlyStoppingOnSection(Section):
    """The run ends when a metric has stopped improving."""

    kind: Literal["on"]
    metric: Text = "loss"
    direction: Literal["min", "max"] = "min"
    patience: Whole = 3
    """Evaluations without improvement until the run ends."""
    min_delta: NotNegativeNumber = 0.0
    """What counts as an improvement must exceed this."""


EarlyStoppingSection = Annotated[
    EarlyStoppingOffSection | EarlyStoppingOnSection, Field(discriminator="kind")
]


class LogSection(Section):
    """What is shown and recorded beside the metrics log, which always is."""

    console: Literal["auto", "live", "plain", "off"] = "auto"
    tensorboard: bool = False
    sinks: Annotated[tuple[SinkSection, ...], Field(strict=False)] = ()
    """Further places that the numbers go to."""
    weight_norm_every: EverySteps = Steps(50)
    details_every: EverySteps = Steps(100)
    """How often further signals are taken: how far weights move, dead units, clipped updates."""
    layers: Annotated[tuple[Text, ...], Field(strict=False)] = ()
    """Shell patterns of parameter names, such as `blocks.*.weight`, whose norms are among them."""
