"""Counts with a unit: steps, tokens, samples, epochs, seconds, bytes, FLOPs. Units do not mix.

Never converts one unit into another: that needs facts about a run, see `counting.py`.
"""

from __future__ import annotations

import difflib
import re
from abc import ABC
from dataclasses import dataclass
from decimal import Decimal
from typing import ClassVar, Self

from surefoot.core.errors import MixedUnitsError, RequestError


@dataclass(frozen=True, slots=True)
class Count(ABC):
    """A nonnegative number of something. Use one of the kinds below, not this base.

    Two counts of one kind add, subtract, compare and divide (a ratio, a plain number); a count
    times a plain number is a count. Counts of two kinds raise `MixedUnitsError`, a `TypeError`;
    only `==` is allowed and is False, so that counts work as dictionary keys.
    """

    value: float

    kind: ClassVar[str] = ""
    """Plural name of the unit, used in messages."""
    symbol: ClassVar[str] = ""
    """Unit written by `str` and read by `parse_count`."""
    whole: ClassVar[bool] = True
    """Whether only integers are valid."""

    def __post_init__(self) -> None:
        if not self.kind:
            raise TypeError("Count is abstract: use Steps, Tokens, Samples, Epochs, Seconds, ...")
        number = self.value
        if isinstance(number, bool) or not isinstance(number, int if self.whole else (int, float)):
            expected = "a whole number" if self.whole else "a number"
            raise RequestError(
                f"{self.kind} are counted with {expected}, not {number!r}",
                rule=f"a count of {self.kind} is {expected}",
            )
        if not self.whole:
            # One form for each amount: 5400 s and 5400.0 s are written, stored and compared alike.
            number = _as_float(number)
            object.__setattr__(self, "value", number)
        if not 0 <= number < float("inf"):
            raise RequestError(
                f"{number!r} is not a count of {self.kind}", rule="it is finite and not negative"
            )

    def _same(self, other: object, verb: str) -> Self:
        if isinstance(other, type(self)):
            return other
        name = other.kind if isinstance(other, Count) else f"the plain value {other!r}"
        raise MixedUnitsError(
            f"cannot {verb} {self.kind} and {name}",
            rule="counts of different kinds do not mix",
            remedy="convert one of them with surefoot.core.counting, given facts of the run",
        )

    def __add__(self, other: object) -> Self:
        return type(self)(self.value + self._same(other, "add").value)

    def __sub__(self, other: object) -> Self:
        return type(self)(self.value - self._same(other, "subtract").value)

    def __mul__(self, factor: int | float) -> Self:
        if isinstance(factor, Count):
            self._same(factor, "multiply")
            raise MixedUnitsError(
                f"cannot multiply {self.kind} by {self.kind}",
                rule="a count is multiplied by a plain number",
            )
        return type(self)(self.value * factor)

    __rmul__ = __mul__

    def __truediv__(self, other: object) -> float:
        return self.value / self._same(other, "divide").value

    def __floordiv__(self, other: object) -> int:
        return int(self.value // self._same(other, "divide").value)

    def __mod__(self, other: object) -> Self:
        return type(self)(self.value % self._same(other, "divide").value)

    def __lt__(self, other: object) -> bool:
        return self.value < self._same(other, "compare").value

    def __le__(self, other: object) -> bool:
        return self.value <= self._same(other, "compare").value

    def __gt__(self, other: object) -> bool:
        return self.value > self._same(other, "compare").value

    def __ge__(self, other: object) -> bool:
        return self.value >= self._same(other, "compare").value

    def __bool__(self) -> bool:
        return self.value != 0

    def __str__(self) -> str:
        number = self.value
        if isinstance(number, float) and number.is_integer() and abs(number) < 1e15:
            number = int(number)
        unit = self.symbol
        if number == 1 and unit == self.kind:
            unit = unit.removesuffix("s")
        return f"{number!r} {unit}"


@dataclass(frozen=True, slots=True, repr=True)
class Steps(Count):
    """Updates completed."""

    value: int
    kind = "steps"
    symbol = "steps"


@dataclass(frozen=True, slots=True)
class Tokens(Count):
    """Loss-bearing tokens."""

    value: int
    kind = "tokens"
    symbol = "tokens"


@dataclass(frozen=True, slots=True)
class Samples(Count):
    """Samples, over all data-parallel ranks."""

    value: int
    kind = "samples"
    symbol = "samples"


@dataclass(frozen=True, slots=True)
class Epochs(Count):
    """Passes over the training set; may be fractional."""

    kind = "epochs"
    symbol = "epochs"
    whole = False


@dataclass(frozen=True, slots=True)
class Seconds(Count):
    """Wall time in seconds."""

    kind = "seconds"
    symbol = "s"
    whole = False


@dataclass(frozen=True, slots=True)
class Bytes(Count):
    """Bytes of memory or of a file."""

    value: int
    kind = "bytes"
    symbol = "B"


@dataclass(frozen=True, slots=True)
class Flops(Count):
    """Floating-point operations (an amount, not a rate)."""

    kind = "FLOPs"
    symbol = "FLOPs"
    whole = False


_SCALES = {"": 1, "k": 10**3, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}

_WORDS: dict[str, tuple[type[Count], int]] = {
    **dict.fromkeys(("step", "steps", "update", "updates"), (Steps, 1)),
    **dict.fromkeys(("token", "tokens"), (Tokens, 1)),
    **dict.fromkeys(("sample", "samples"), (Samples, 1)),
    **dict.fromkeys(("epoch", "epochs"), (Epochs, 1)),
    **dict.fromkeys(("s", "sec", "second", "seconds"), (Seconds, 1)),
    **dict.fromkeys(("min", "minute", "minutes"), (Seconds, 60)),
    **dict.fromkeys(("h", "hour", "hours"), (Seconds, 3600)),
    **dict.fromkeys(("d", "day", "days"), (Seconds, 86400)),
    **dict.fromkeys(("FLOP", "FLOPs"), (Flops, 1)),
    **dict.fromkeys(("B", "byte", "bytes"), (Bytes, 1)),
    **{f"{prefix}B": (Bytes, 10 ** (3 * power)) for power, prefix in enumerate("kMGT", 1)},
    **{f"{prefix}iB": (Bytes, 2 ** (10 * power)) for power, prefix in enumerate("KMGT", 1)},
}

_COUNT = re.compile(
    r"\s*(?P<number>[0-9][0-9_]*(?:\.[0-9]+)?(?:[eE][+-]?[0-9]{1,3})?)"
    r"\s*(?:(?P<scale>[kKMBT])\s*(?=(?:step|update|token|sample|FLOP)))?(?P<unit>[A-Za-z]*)\s*"
)


def parse_count(text: str) -> Count:
    """Parses a count and its unit.

    Units: `steps` (or `updates`), `tokens`, `samples`, `epochs`, `s`, `min`, `h`, `d`, `B`, `kB` to
    `TB` (powers of 1000), `KiB` to `TiB` (powers of 1024), `FLOPs`. Steps, tokens, samples and
    FLOPs may have a suffix `k`, `M`, `B` (10^9) or `T`. Underscores may group digits; commas may
    not, since they are decimal points in some countries.

    >>> parse_count("375M tokens"), parse_count("10_000 steps"), parse_count("1.5h")
    (Tokens(value=375000000), Steps(value=10000), Seconds(value=5400.0))
    >>> parse_count("4 GiB") == Bytes(4 * 2**30)
    True

    Raises:
        RequestError: no number, no unit, an unknown unit, or a fraction of an integer unit.
    """
    match = _COUNT.fullmatch(text)
    if match is None:
        raise RequestError(
            f"{text!r} is not a count",
            rule="a count is a number and a unit",
            remedy="write for example '1000 steps', '375M tokens', '2 epochs', '30 min', '4 GiB'",
        )
    kind, multiplier = _unit(text, match["unit"])
    exact = Decimal(match["number"].replace("_", "")) * _SCALES[match["scale"] or ""] * multiplier
    if not kind.whole:
        return kind(float(exact))
    if exact != exact.to_integral_value():
        raise RequestError(
            f"{text!r} is not a whole number of {kind.kind}",
            rule=f"a count of {kind.kind} is a whole number",
        )
    return kind(int(exact))


def _as_float(number: float) -> float:
    try:
        return float(number)
    except OverflowError:
        return float("inf")


def _unit(text: str, word: str) -> tuple[type[Count], int]:
    found = _WORDS.get(word) or _WORDS.get(word.lower() if len(word) > 2 else word)
    if found is None and word.lower() in ("flop", "flops"):
        found = _WORDS["FLOPs"]
    if found is not None:
        return found
    if not word:
        number = text.strip()
        raise RequestError(
            f"{text!r} has no unit",
            rule="a count is a number and a unit",
            remedy=f"write '{number} steps', or tokens, samples, epochs, s, min, h",
        )
    spellings = {known.lower(): known for known in _WORDS}
    near = difflib.get_close_matches(word.lower(), spellings, n=1)
    raise RequestError(
        f"{text!r}: unknown unit {word!r}",
        rule="the unit is one of steps, tokens, samples, epochs, s, min, h, d, B, kB, GiB, FLOPs",
        remedy=f"did you mean {spellings[near[0]]!r}?" if near else "",
    )
