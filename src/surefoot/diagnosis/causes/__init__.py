"""The causes that the doctor knows: those of this package, and what other packages bring.

An entry point of the group `surefoot.causes` names a cause, or a module that holds causes. Each
family here is such a module.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint
from types import ModuleType

from surefoot.core.doors import Door, families_and_brought
from surefoot.core.errors import RequestError
from surefoot.diagnosis.causes.base import Cause, CauseInfo, Sign, SignText, cause, sign
from surefoot.diagnosis.causes.page import read_page

__all__ = [
    "Cause",
    "CauseInfo",
    "CauseRegistry",
    "LeftOut",
    "Sign",
    "SignText",
    "all_causes",
    "cause",
    "cause_registry",
    "read_page",
    "sign",
]
FAMILIES = (
    "rate_too_high",
    "rate_too_low",
    "gradients",
    "not_finite",
    "data",
    "generalization",
    "resources",
)
OWN = "surefoot"


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A cause that could not be asked, the package that brings it, and why."""

    name: str
    origin: str
    reason: str

    def __str__(self) -> str:
        return f"{self.name} of {self.origin} is left out: {self.reason}"


@dataclass
class CauseRegistry:
    """All causes by code, and what was left out."""

    causes: dict[str, Cause] = field(default_factory=dict)
    left_out: list[LeftOut] = field(default_factory=list)

    def add(self, entry: EntryPoint) -> None:
        """Takes up what an entry point names; what is wrong with it is noted, never raised."""
        origin = entry.dist.name if entry.dist is not None else OWN
        try:
            for found in _causes_of(entry.load()):
                self.include(dataclasses.replace(found, origin=origin))
        except Exception as error:
            what = str(error).partition("\n")[0]
            self.left_out.append(LeftOut(entry.name, origin, f"{type(error).__name__}: {what}"))

    def include(self, found: Cause) -> None:
        """Takes up a cause.

        Raises:
            RequestError: another one has its code or its slug.
        """
        for other in self.causes.values():
            if found.info.code == other.info.code or found.info.slug == other.info.slug:
                raise RequestError(
                    f"{other.origin} has a cause {other.info.code} {other.info.slug}",
                    where=f"{found.info.code} {found.info.slug} of {found.origin}",
                    rule="a code and a slug each mean one cause",
                    remedy="give it another code and slug",
                )
        self.causes[found.info.code] = found


@functools.cache
def cause_registry() -> CauseRegistry:
    """Imports all causes that are installed, our own first."""
    found = CauseRegistry()
    entries, clash = families_and_brought(Door.CAUSES, __name__, FAMILIES)
    if clash:
        found.left_out.append(LeftOut("a cause", "two packages", clash))
    for entry in entries:
        found.add(entry)
    return found


def all_causes() -> tuple[Cause, ...]:
    """Every installed cause, by code."""
    causes = cause_registry().causes
    return tuple(causes[code] for code in sorted(causes))


def _causes_of(named: object) -> Iterable[Cause]:
    """The causes that an entry point stands for."""
    if isinstance(named, ModuleType):
        found = (value for value in vars(named).values() if isinstance(value, Cause))
        return [value for value in found if value.look.__module__ == named.__name__]
    if not isinstance(named, Cause):
        raise TypeError(f"{named!r} is no cause, and no module of causes")
    return [named]
