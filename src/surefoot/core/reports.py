"""Reports for observers: frozen host numbers.

A report never holds a tensor or a module, so that an observer cannot change a run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple, Protocol


class StepReport(NamedTuple):
    """One update, as it was computed. All values are plain Python numbers.

    >>> counts = {"step": 1, "window": 1, "epoch": 0, "samples": 8, "tokens": 0, "weight": 8.0}
    >>> report = StepReport(
    ...     **counts, loss=0.5, terms={}, grad_norm=1.5, clipped=True, applied=True,
    ...     lr={"decay": 1e-3}, loss_scale=1.0,
    ... )
    >>> report.loss, report.lr["decay"]
    (0.5, 0.001)
    """

    step: int
    """Updates completed after this one (a skipped update does not count)."""
    window: int
    """Windows consumed so far, including this one; unique for every row of a run."""
    epoch: int
    """Of the last sample of the window."""
    samples: int
    """Samples seen so far, over all data-parallel ranks."""
    tokens: int
    """Loss-bearing tokens seen so far; 0 if the task does not count tokens."""
    loss: float
    """Loss sum of the whole window over its denominator."""
    terms: Mapping[str, float]
    """Terms of a loss that has several; else empty."""
    weight: float
    """Denominator of the update: number of loss-bearing items over the data-parallel ranks."""
    grad_norm: float
    """Global gradient norm before clipping."""
    clipped: bool
    applied: bool
    """False if the update was skipped."""
    lr: Mapping[str, float]
    """Learning rate of each parameter group in this update."""
    loss_scale: float
    """Loss scale of this update; 1.0 if none is needed."""
    sample_ids: tuple[int, ...] = ()
    """Ids of the samples of this rank's window."""
    weight_norm: float | None = None
    """Global weight norm after the update, on updates that measure it."""
    details: Mapping[str, float] = MappingProxyType({})
    """Further signals by name, on sampled windows; else empty."""
    step_seconds: float = 0.0
    """Wall time from the end of the previous update to the end of this one."""
    data_seconds: float = 0.0
    """The part of it spent waiting for data."""
    memory_bytes: int = 0
    """Peak memory: allocated on the device, or resident in the process on CPU."""
    time: float = 0.0
    """Unix time at which the report was resolved."""
    ends_epoch: bool = False
    """Whether the window is the last one of its epoch."""


@dataclass(frozen=True, slots=True)
class EvalReport:
    """One evaluation of one validation set at one step.

    >>> EvalReport(10, "validation", {"loss": 0.5}, weight=64.0, samples=64).metrics["loss"]
    0.5
    """

    step: int
    name: str
    """Name of the validation set."""
    metrics: Mapping[str, float]
    """Metric name to value; always includes `loss`."""
    weight: float
    """Number of loss-bearing items that the loss was averaged over."""
    samples: int
    weights: str = "raw"
    """Which weights were evaluated: `raw` or `ema`."""
    seconds: float = 0.0
    time: float = 0.0


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened to a run, such as a start, a resume, a skip, a save or a failure.

    >>> Event("save", 100, "saved step-00000100").kind
    'save'
    """

    kind: str
    step: int
    message: str
    data: Mapping[str, object] = field(default_factory=dict)
    time: float = 0.0


class Observer(Protocol):
    """Reads reports. It must return quickly and cannot change the run.

    Every method is optional: an object with one of them is an observer. A class that inherits from
    this one gets the others as no-ops.

    >>> class Losses(Observer):
    ...     def __init__(self) -> None:
    ...         self.losses: list[float] = []
    ...
    ...     def on_step(self, report: StepReport) -> None:
    ...         self.losses.append(report.loss)
    >>> Losses().on_event(Event("note", 0, "nothing happens"))
    """

    def on_step(self, report: StepReport) -> None:
        """One update, once its numbers have arrived."""
        return

    def on_eval(self, report: EvalReport) -> None:
        """One evaluation of one validation set."""
        return

    def on_event(self, event: Event) -> None:
        """A start, a save, a skip, a failure; see `surefoot.observe.events.EventKind`."""
        return

    def close(self) -> None:
        """The run has ended or failed; called once."""
        return
