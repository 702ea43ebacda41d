"""The two complete configurations: `Settings` (how to train) and `Recipe` (what to train on what).

Validation here checks each section by itself; rules across sections are in `rules` and are run by
`load_recipe` and `resolve_settings`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Annotated, Literal

from pydantic import Field

from surefoot.config.fields import Name, Section, Text
from surefoot.config.sections.contract import ContractOffSection, ContractSection
from surefoot.config.sections.data import DataSection
from surefoot.config.sections.memory import MemorySection
from surefoot.config.sections.models import ModelSection
from surefoot.config.sections.optimizers import AdamWSection, OptimizerSection
from surefoot.config.sections.parallel import ParallelSection
from surefoot.config.sections.parts import MetricSection, ObserverSection, SamplerSection
from surefoot.config.sections.run import (
    CheckpointSection,
    EarlyStoppingOffSection,
    EarlyStoppingSection,
    EmaOffSection,
    EmaSection,
    EvaluateSection,
    GuardSection,
    LoaderSection,
    LogSection,
    PrecisionSection,
    TrainSection,
)
from surefoot.config.sections.schedules import ScheduleSection, WarmupCosineSection
from surefoot.config.sections.tasks import TaskSection


class RunSections(Section, ABC):
    """The sections that `Settings` and `Recipe` share. Abstract: use one of the two."""

    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    deterministic: bool = False
    train: TrainSection
    optimizer: OptimizerSection = AdamWSection()
    schedule: ScheduleSection = WarmupCosineSection()
    sampler: SamplerSection = SamplerSection(kind="shuffled")
    precision: PrecisionSection = PrecisionSection()
    parallel: ParallelSection = ParallelSection()
    memory: MemorySection = MemorySection()
    loader: LoaderSection = LoaderSection()
    evaluate: EvaluateSection = EvaluateSection()
    checkpoint: CheckpointSection = CheckpointSection()
    guard: GuardSection = GuardSection()
    ema: EmaSection = EmaOffSection()
    early_stopping: EarlyStoppingSection = EarlyStoppingOffSection()
    contract: ContractSection = ContractOffSection()
    log: LogSection = LogSection()
    observers: Annotated[tuple[ObserverSection, ...], Field(strict=False)] = ()
    """Who reads each report besides the run's own logs."""

    @property
    @abstractmethod
    def settings(self) -> Settings:
        """How to train, without what is trained on what."""


class Settings(RunSections):
    """How to train a given model on given data with a given task.

    `Trainer` and `TrainStep` take one, or a mapping of the same shape.

    >>> from surefoot.config.sections import TrainSection
    >>> from surefoot.core.units import Steps
    >>> Settings(train=TrainSection(horizon=Steps(100), micro_batch=8)).optimizer.kind
    'adamw'
    """

    @property
    def settings(self) -> Settings:
        """Itself."""
        return self


class Recipe(RunSections):
    """A complete run."""

    name: Name
    model: ModelSection
    data: DataSection
    task: TaskSection
    metrics: dict[Text, MetricSection] = Field(default_factory=dict)
    """By the name that an evaluation gives them."""

    @property
    def settings(self) -> Settings:
        """The part that says how to train."""
        return Settings(**{name: getattr(self, name) for name in Settings.model_fields})
