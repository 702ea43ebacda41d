"""The base class of all sections, and the types of values in a recipe.

Never repairs a value: an invalid one is refused with the rule and, if there is one, a remedy.
"""

from __future__ import annotations

import re
from abc import ABC
from collections.abc import Callable
from math import inf
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer, WithJsonSchema
from pydantic_core import PydanticCustomError

from surefoot.core.errors import RequestError
from surefoot.core.units import (
    Count,
    Epochs,
    Flops,
    Samples,
    Seconds,
    Steps,
    Tokens,
    parse_count,
)


class Section(BaseModel, ABC):
    """Frozen, typed and strict: an unknown key or a value of another type is an error."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        arbitrary_types_allowed=True,
        protected_namespaces=(),
    )


def refuse(rule: str, remedy: str = "") -> PydanticCustomError:
    """The error that a validator raises."""
    return PydanticCustomError("rule", "{rule}", {"rule": rule, "remedy": remedy})


_LENGTHS: tuple[type[Count], ...] = (Steps, Tokens, Samples, Epochs, Seconds, Flops)
_UPDATES: tuple[type[Count], ...] = (Steps, Tokens, Samples, Epochs)


def _count_of(
    kinds: tuple[type[Count], ...], *choices: str, bare_steps: bool = False, share: bool = False
) -> Callable[[object], object]:
    """Parses a count of these kinds, or one of the choices; with `share`, also 0 or a share."""
    others = "".join(f", or {choice!r}" for choice in choices)
    if share:
        others = ", or a share of the horizon such as 0.02" + others
    names = ", ".join(kind.kind for kind in kinds)

    def read(value: object) -> object:
        if isinstance(value, str):
            return value if value in choices else checked(_parsed(value, others))
        if share and isinstance(value, float):
            if 0 <= value < 1:
                return value
            raise refuse(
                f"a share of the horizon is in [0, 1), not {value!r}",
                "write updates without a decimal point, such as 100",
            )
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            if bare_steps and isinstance(value, int) and value >= 0:
                return checked(Steps(value))
            unit = kinds[0].symbol
            raise refuse(f"{value!r} has no unit", f"write for example '{value} {unit}'")
        return checked(value)

    def checked(value: object) -> object:
        if not isinstance(value, kinds):
            what = value.kind if isinstance(value, Count) else repr(value)
            raise refuse(f"must be a count in {names}{others}, not {what}")
        if not value and not share:
            raise refuse(f"must be more than 0 {value.kind}")
        return value

    return read


def _parsed(text: str, others: str) -> Count:
    try:
        return parse_count(text)
    except RequestError as error:
        raise refuse(f"{error.what}{others}", error.remedy) from None


def _written(value: object) -> object:
    return str(value) if isinstance(value, Count) else value


_TEXT = {"type": "string"}
_TEXT_OR_NUMBER = {"type": ["string", "number"]}


def _annotated(read: Callable[[object], object], schema: dict[str, Any]) -> tuple[Any, ...]:
    return (BeforeValidator(read), PlainSerializer(_written), WithJsonSchema(schema))


Horizon = Annotated[Count, *_annotated(_count_of(_LENGTHS), _TEXT)]
"""How long a run is: steps, tokens, samples, epochs, time or FLOPs."""

Duration = Annotated[Seconds, *_annotated(_count_of((Seconds,)), _TEXT)]
"""A time."""

DurationOrNone = Annotated[Seconds | str, *_annotated(_count_of((Seconds,), "none"), _TEXT)]
"""A time, or `none`."""

EveryEpoch = Annotated[
    Count | str, *_annotated(_count_of(_LENGTHS[:5], "epoch", "end", "never"), _TEXT)
]
"""When to evaluate: periodically, after each epoch, at the end, or never."""

EveryOrEnd = Annotated[Count | str, *_annotated(_count_of(_LENGTHS[:5], "epoch", "end"), _TEXT)]
"""When to save: periodically, after each epoch, or at the end."""

EveryOrNever = Annotated[Count | str, *_annotated(_count_of(_LENGTHS[:5], "never"), _TEXT)]
"""Periodically, or never."""

EverySteps = Annotated[Steps | str, *_annotated(_count_of((Steps,), "never"), _TEXT)]
"""Every so many updates, or never."""

Span = Annotated[
    Count | float, *_annotated(_count_of(_UPDATES, bare_steps=True, share=True), _TEXT_OR_NUMBER)
]
"""A part of a run: a count (a bare integer is updates) or a share of the horizon below 1."""

SpanOrUndecided = Annotated[
    Count | float | str,
    *_annotated(_count_of(_UPDATES, "undecided", bare_steps=True, share=True), _TEXT_OR_NUMBER),
]
"""A part of a run, or `undecided`."""

CooldownStart = Annotated[
    Count | float | str,
    *_annotated(_count_of(_UPDATES, "before-end", bare_steps=True, share=True), _TEXT_OR_NUMBER),
]
"""Where a cooldown starts: its own length before the end of the run, or at a count."""

Period = Annotated[Count, *_annotated(_count_of(_UPDATES, bare_steps=True), _TEXT_OR_NUMBER)]
"""A count of updates, tokens, samples or epochs; a bare integer is updates."""

Total = Annotated[
    Count | str,
    *_annotated(_count_of(_UPDATES, "horizon", "begun", bare_steps=True), _TEXT_OR_NUMBER),
]
"""Where a decay ends: a count; `horizon`, the end of the run; or `begun`, the horizon that the run
began with: a longer one later changes no rate, which then stays at its last value."""


def _number_or(choice: str, *, zero: bool = False) -> Callable[[object], object]:
    bound = "of at least 0" if zero else "above 0"

    def read(value: object) -> object:
        if isinstance(value, str) and value == choice:
            return value
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            number = float(value)
            if 0 < number < float("inf") or (zero and number == 0):
                return number
        raise refuse(f"must be a number {bound}, or {choice!r}, not {value!r}")

    return read


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _whole_or(choice: str) -> Callable[[object], object]:
    def read(value: object) -> object:
        if _is_whole(value) or (isinstance(value, str) and value == choice):
            return value
        raise refuse(f"must be a whole number of at least 1, or {choice!r}, not {value!r}")

    return read


def _whole_or_wholes(value: object) -> object:
    if _is_whole(value):
        return value
    if isinstance(value, (list, tuple)) and value and all(map(_is_whole, value)):
        return tuple(value)
    raise refuse(f"must be a whole number of at least 1, or a list of them, not {value!r}")


def _any_number_or_none(value: object) -> object:
    if value == "none":
        return value
    if isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < inf:
        return float(value)
    raise refuse(f"must be a number, or 'none', not {value!r}")


NumberOrNone = Annotated[
    float | str, BeforeValidator(_any_number_or_none), WithJsonSchema(_TEXT_OR_NUMBER)
]
PositiveOrNone = Annotated[
    float | str, BeforeValidator(_number_or("none")), WithJsonSchema(_TEXT_OR_NUMBER)
]
ClipNorm = Annotated[
    float | str, BeforeValidator(_number_or("off")), WithJsonSchema(_TEXT_OR_NUMBER)
]
LossScale = Annotated[
    float | str, BeforeValidator(_number_or("dynamic")), WithJsonSchema(_TEXT_OR_NUMBER)
]
WeightDecay = Annotated[
    float | str,
    BeforeValidator(_number_or("as-optimizer", zero=True)),
    WithJsonSchema(_TEXT_OR_NUMBER),
]
Wholes = Annotated[
    int | tuple[int, ...],
    BeforeValidator(_whole_or_wholes),
    WithJsonSchema({"type": ["integer", "array"]}),
]
AsHeads = Annotated[
    int | str, BeforeValidator(_whole_or("as-heads")), WithJsonSchema(_TEXT_OR_NUMBER)
]
FromData = Annotated[
    int | str, BeforeValidator(_whole_or("from-data")), WithJsonSchema(_TEXT_OR_NUMBER)
]
AsDense = Annotated[
    int | str, BeforeValidator(_whole_or("as-dense")), WithJsonSchema(_TEXT_OR_NUMBER)
]
Capacity = Annotated[
    float | str, BeforeValidator(_number_or("dropless")), WithJsonSchema(_TEXT_OR_NUMBER)
]
AutoSize = Annotated[int | str, BeforeValidator(_whole_or("auto")), WithJsonSchema(_TEXT_OR_NUMBER)]
AS_TASK: Final = "as-task"
"""Of a metric or its direction: the task says it."""
WatchedDirection = Literal["as-task", "min", "max"]
AsInTraining = Annotated[
    int | str, BeforeValidator(_whole_or("as-in-training")), WithJsonSchema(_TEXT_OR_NUMBER)
]

Whole = Annotated[int, Field(ge=1)]
NotNegative = Annotated[int, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
NotNegativeNumber = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
BelowOne = Annotated[float, Field(ge=0, lt=1)]
Factor = Annotated[float, Field(gt=0, lt=1)]

_TARGET = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*", re.ASCII)


def is_target(text: str) -> bool:
    """Whether a text is spelt as `package.module:Name`."""
    return _TARGET.fullmatch(text) is not None


def _target(*choices: str) -> Callable[[object], object]:
    others = "".join(f", or {choice!r}" for choice in choices)

    def read(value: object) -> object:
        if isinstance(value, str) and (value in choices or is_target(value)):
            return value
        raise refuse(
            f"must name a class or function as 'package.module:Name'{others}, not {value!r}",
            "write the module, a colon, and the name inside it",
        )

    return read


Target = Annotated[str, BeforeValidator(_target())]
"""User code, as data: `package.module:Name`. Only the syntax is checked here."""
TargetOrSamples = Annotated[str, BeforeValidator(_target("samples"))]
TargetOrNone = Annotated[str, BeforeValidator(_target("none"))]

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", re.ASCII)


def _check_name(value: object) -> object:
    # The name becomes part of a folder's name: a separator in it would write elsewhere.
    if not isinstance(value, str) or not _NAME.fullmatch(value):
        raise refuse(
            f"must be letters, digits, '.', '_', '-', the first a letter or digit, not {value!r}"
        )
    return value


Name = Annotated[str, BeforeValidator(_check_name)]
Text = Annotated[str, Field(min_length=1)]
Names = Annotated[tuple[Text, ...], Field(strict=False)]
"""Glob patterns (`*`, `?`, `[...]`) that are matched against full parameter names."""
Arguments = dict[str, Any]
"""Keyword arguments of user code: plain data."""
