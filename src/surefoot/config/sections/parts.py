"""Sections of parts that a user or another package can provide, by target or registered name.

A section only names a part; `surefoot.core.doors` finds and imports it when the run is built.
"""

from __future__ import annotations

from abc import ABC
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Final

from pydantic import (
    Discriminator,
    Field,
    SerializerFunctionWrapHandler,
    ValidationInfo,
    field_validator,
    model_serializer,
    model_validator,
)

from surefoot.config.fields import Arguments, Section, Text, is_target, refuse
from surefoot.core.doors import CUSTOM, GIVEN, Door, brought, is_part, near_name, parts

NO_TARGET: Final = "none"
PART_TAG: Final = "(part)"
"""Tag of `PartSection` in a union of sections; never a key or a kind."""


class PartSection(Section, ABC):
    """A part by its name.

    `kind: custom` with `target: package.module:Name` is the user's own code; any other kind is the
    name of a part of ours or of an installed package. `kind: given` stands in the configuration of
    a run whose part was handed in by Python code.
    """

    door: ClassVar[Door]
    kind: Text
    target: Annotated[str, Field(validate_default=True)] = NO_TARGET
    """For `custom` alone: `package.module:Name`, imported, never evaluated."""
    arguments: Arguments = Field(default_factory=dict)
    """Passed by name."""

    @classmethod
    def kinds(cls) -> tuple[str, ...]:
        """What `kind` may be in a recipe."""
        return (*parts(cls.door), CUSTOM)

    @field_validator("kind")
    @classmethod
    def _is_known(cls, kind: str) -> str:
        if kind in (CUSTOM, GIVEN) or is_part(cls.door, kind):
            return kind
        own = f"for your own code write kind: custom and target: {kind}" if ":" in kind else ""
        rule = f"unknown kind {kind!r}; one of {', '.join(cls.kinds())}"
        raise refuse(rule, own or near_name(kind, cls.kinds()))

    @field_validator("target", mode="before")
    @classmethod
    def _fits_the_kind(cls, target: object, info: ValidationInfo) -> object:
        kind = info.data.get("kind", GIVEN)
        if kind == CUSTOM and not (isinstance(target, str) and is_target(target)):
            raise refuse(
                f"must name a class or function as 'package.module:Name', not {target!r}",
                "write the module, a colon, and the name inside it",
            )
        if kind not in (CUSTOM, GIVEN) and target != NO_TARGET:
            raise refuse(f"a target is for kind: custom, and the kind is {kind}", "leave it out")
        return target

    @model_serializer(mode="wrap")
    def _without_defaults(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leaves out defaults: no target, and no arguments of a registered part."""
        written: dict[str, Any] = handler(self)
        if self.target == NO_TARGET:
            written.pop("target", None)
            if not self.arguments:
                written.pop("arguments", None)
        return written


def by_kind(door: Door, *typed: str) -> Discriminator:
    """Chooses in a union: a kind that has a section of its own, or `PartSection` for all others.

    Args:
        typed: the kinds with sections of their own.
    """

    def tag(value: Any) -> Any:
        is_section = isinstance(value, Mapping)
        kind = value.get("kind") if is_section else getattr(value, "kind", None)
        if not isinstance(kind, str):
            return kind
        is_theirs = kind not in typed and (kind in (CUSTOM, GIVEN) or kind in brought(door))
        return PART_TAG if is_theirs else kind

    return Discriminator(tag)


class ClipSection(PartSection):
    """How gradients are clipped; `norm` scales them all by `train.clip_norm` over their norm."""

    door = Door.CLIPS

    @model_validator(mode="before")
    @classmethod
    def _is_no_number(cls, given: object) -> object:
        if isinstance(given, Mapping | ClipSection):
            return given
        raise refuse(f"must be a section of keys, not {given!r}", "a bound is train.clip_norm")


class SamplerSection(PartSection):
    """In which order samples come; `shuffled` is another permutation for each epoch."""

    door = Door.SAMPLERS


class MetricSection(PartSection):
    """A metric besides those of the task: `(model, batch) -> (numerator, denominator)`."""

    door = Door.METRICS


class ObserverSection(PartSection):
    """An observer, called with each report."""

    door = Door.OBSERVERS


class SinkSection(PartSection):
    """Another destination for the numbers of a run."""

    door = Door.SINKS
