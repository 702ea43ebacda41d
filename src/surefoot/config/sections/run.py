"""Sections of a run: length, batches, precision, evaluation, checkpoints, guard, log."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from surefoot.config.fields import (
    AS_TASK,
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
    WatchedDirection,
    Whole,
)
from surefoot.config.sections.parts import ClipSection, SinkSection
from surefoot.core.units import Seconds, Steps


class TrainSection(Section):
    """The length of the run and the shape of an update."""

    horizon: Horizon
    micro_batch: Whole
    """Number of samples of one forward and backward on one rank."""
    accumulation: Whole = 1
    """Window length: number of micro-batches per update on one rank."""
    clip_norm: ClipNorm = 1.0
    clip: ClipSection = ClipSection(kind="norm")
    """How; a clip of one's own that has a `max_norm` is given `clip_norm`."""
    compile: Literal["auto", "off", "blocks", "whole"] = "auto"
    """`auto`: on a CUDA device, where the run is long enough to pay for the compilation."""
    channels_last: Literal["auto", "on", "off"] = "auto"
    """Memory layout of the weights of 2-D convolutions; `auto`: on a CUDA device."""
    short_batch: Literal["keep", "drop"] = "keep"
    """Whether the short last update of an epoch is kept or dropped."""


class PrecisionSection(Section):
    """Dtypes of the forward and backward."""

    dtype: Literal["auto", "fp32", "tf32", "bf16", "fp16"] = "auto"
    loss_scale: LossScale = "dynamic"
    """For fp16 only: `dynamic`, or a constant."""


class LoaderSection(Section):
    """How batches are fetched; does not change which."""

    workers: NotNegative = 0
    pin_memory: Literal["auto", "on", "off"] = "auto"
    prefetch: Whole = 2
    """Number of batches that each worker keeps ready."""
    deadline: Duration = Seconds(120)
    """Longest time for a batch before its worker is reported as stuck."""


class EvaluateSection(Section):
    """When and on which weights to evaluate. A run that evaluates also does so at its end."""

    every: EveryEpoch = "epoch"
    micro_batch: AsInTraining = "as-in-training"
    weights: Literal["raw", "ema"] = "raw"


class CheckpointSection(Section):
    """When to save. A run always saves at its end."""

    every: EveryOrEnd = Steps(1000)
    mode: Literal["sync", "async"] = "sync"
    """`async` copies the state to host memory and writes it while training continues."""
    keep: Whole = 3
    """Number of latest checkpoints to keep."""
    keep_best: Whole = 1
    """Number of best checkpoints by the deciding metric to keep."""
    save_best: Literal["auto", "on", "off"] = "auto"
    """Save at each evaluation that is the best so far; `auto`: where a metric decides over the end
    (early stopping) or over the verdict (a contract on the best evaluation)."""
    keep_every: EverySteps = "never"
    """Keep checkpoints at multiples of this for ever."""
    ephemeral_every: EveryOrNever = "never"
    """Save more often, keeping such a checkpoint only until the next: for preemptible machines."""
    on_full: Literal["continue", "stop"] = "continue"
    """For a full or failing disk: pause saving, with a warning, or end the run."""


class GuardSection(Section):
    """What happens if a loss or gradient is NaN, infinite, or a spike."""

    non_finite: Literal["stop", "skip"] = "stop"
    skip_budget: Whole = 10
    """Number of updates that `skip` may skip before the run stops."""
    spikes: Literal["log", "skip", "roll-back"] = "log"
    """For a spike: report it; or skip an update whose gradient norm is one; or roll back to before
    it and skip data."""
    spike_budget: Whole = 10
    """Number of spikes that may be skipped or rolled back before the run stops."""
    roll_back_updates: Whole = 100
    """Number of updates before the spike that `roll-back` also undoes."""
    leave_out_windows: Whole = 200
    """Windows of data that are then skipped: those of the undone updates and the next ones."""
    deadline: Duration = Seconds(600)
    """Time without progress after which the stacks of the process are written to a file."""
    restarts_without_progress: Whole = 3
    """A run resumed this often since its last new checkpoint is not resumed again."""
    compare_ranks_every: EverySteps = Steps(500)
    """How often ranks compare the bits of replicated weights, and their speed."""


class EmaOffSection(Section):
    """No moving average."""

    kind: Literal["off"] = "off"


class EmaOnSection(Section):
    """An exponential moving average of the weights."""

    kind: Literal["on"]
    decay: Annotated[float, Field(gt=0, lt=1)] = 0.999


EmaSection = Annotated[EmaOffSection | EmaOnSection, Field(discriminator="kind")]


class EarlyStoppingOffSection(Section):
    """The run continues to its horizon."""

    kind: Literal["off"] = "off"


class EarlyStoppingOnSection(Section):
    """The run ends when a metric has stopped improving."""

    kind: Literal["on"]
    metric: Text = AS_TASK
    """METRIC or SET/METRIC; `as-task`: the one that decides, the contract's or else the task's."""
    direction: WatchedDirection = AS_TASK
    """`as-task`: the way in which that metric is better, where the task or its name says it."""
    patience: Whole = 3
    """Number of evaluations without improvement until the run ends."""
    min_delta: NotNegativeNumber = 0.0
    """Smallest change that counts as an improvement."""


EarlyStoppingSection = Annotated[
    EarlyStoppingOffSection | EarlyStoppingOnSection, Field(discriminator="kind")
]


class LogSection(Section):
    """What is shown and recorded in addition to the metrics log."""

    console: Literal["auto", "live", "plain", "off"] = "auto"
    tensorboard: bool = False
    sinks: Annotated[tuple[SinkSection, ...], Field(strict=False)] = ()
    """Further places that the numbers go to."""
    weight_norm_every: EverySteps = Steps(50)
    details_every: EverySteps = Steps(100)
    """How often further signals are sampled: how far weights move, dead units, clipped updates."""
    layers: Annotated[tuple[Text, ...], Field(strict=False)] = ()
    """Glob patterns of parameter names, such as `blocks.*.weight`, whose norms are sampled."""
