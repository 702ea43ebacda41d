"""Task sections: the meaning of the loss."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, Tag

from surefoot.config.fields import BelowOne, Positive, Section, Target, TargetOrSamples
from surefoot.config.sections.parts import PART_TAG, PartSection, by_kind
from surefoot.core.doors import OURS, Door


class GenerationSection(Section):
    """Next-token prediction; counts tokens."""

    kind: Literal["generation"]


class ClassificationSection(Section):
    """One class of several; counts samples."""

    kind: Literal["classification"]
    label_smoothing: BelowOne = 0.0
    """Share of the target spread evenly over all classes, including the right one."""


class RegressionSection(Section):
    """Numbers; counts samples."""

    kind: Literal["regression"]
    loss: Literal["mse", "mae", "huber"] = "mse"
    delta: Positive = 1.0
    """Error from which the Huber loss is linear."""


class MultilabelSection(Section):
    """Several binary labels; counts samples."""

    kind: Literal["multilabel"]


class FunctionSection(Section):
    """A user-defined function `loss(model, batch) -> sum`, with its weight and metrics."""

    kind: Literal["function"]
    loss: Target
    weight: TargetOrSamples = "samples"
    unit: Literal["samples", "tokens", "elements"] = "samples"
    metrics: dict[str, Target] = Field(default_factory=dict)


class CustomTaskSection(PartSection):
    """A task of the user's own or of an installed package."""

    door: ClassVar[Door] = Door.TASKS


TaskSection = Annotated[
    Annotated[GenerationSection, Tag("generation")]
    | Annotated[ClassificationSection, Tag("classification")]
    | Annotated[RegressionSection, Tag("regression")]
    | Annotated[MultilabelSection, Tag("multilabel")]
    | Annotated[FunctionSection, Tag("function")]
    | Annotated[CustomTaskSection, Tag(PART_TAG)],
    by_kind(Door.TASKS, *OURS[Door.TASKS]),
]
