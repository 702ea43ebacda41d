"""The rules of the audit: those of this package, and what other packages bring.

An entry point of the group `surefoot.rules` names a rule, or a package each of whose modules holds
rules. Each family here is such a package.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint
from types import ModuleType

from surefoot.core.doors import Door, families_and_brought
from surefoot.sanitizer.rules.base import (
    NOWHERE,
    Certainty,
    Finding,
    Findings,
    Looks,
    Rule,
    RuleInfo,
    Site,
    Tally,
    UpdateTally,
    share,
)

__all__ = [
    "NOWHERE",
    "Certainty",
    "Finding",
    "Findings",
    "Looks",
    "Registered",
    "Registry",
    "Rule",
    "RuleInfo",
    "Site",
    "Tally",
    "UpdateTally",
    "all_rules",
    "registry",
    "share",
]
FAMILIES = (
    "gradients",
    "accumulation",
    "schedule",
    "modes",
    "coverage",
    "losses",
    "data",
    "distributed",
    "resume",
)
OWN = "surefoot"


@dataclass(frozen=True)
class Registered:
    """A rule, and where it comes from."""

    rule: type[Rule]
    family: str
    origin: str
    """Name of the installed package that brings it."""

    @property
    def info(self) -> RuleInfo:
        return self.rule.info


@dataclass
class Registry:
    """All rules by code, and what was left out."""

    entries: dict[str, Registered] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)
    """What other packages bring and cannot be used, each with the reason."""

    def add(self, entry: EntryPoint) -> None:
        """Takes up what an entry point names; what is wrong with it is noted, never raised."""
        origin = entry.dist.name if entry.dist is not None else OWN
        try:
            family, rules = _rules_of(entry.load(), entry.name)
        except Exception as error:
            self._leave_out(entry.name, origin, f"{type(error).__name__}: {error}")
            return
        for rule in rules:
            code = rule.info.code
            if code in self.entries:
                taken = self.entries[code]
                self._leave_out(rule.__name__, origin, f"{taken.origin} has a rule {code}")
            else:
                self.entries[code] = Registered(rule, family, origin)

    def _leave_out(self, name: str, origin: str, why: str) -> None:
        self.left_out.append(f"{name} of {origin} is left out: {why}")


@functools.cache
def registry() -> Registry:
    """Imports all rules that are installed, our own first."""
    found = Registry()
    entries, clash = families_and_brought(Door.RULES, __name__, FAMILIES)
    if clash:
        found.left_out.append(clash)
    for entry in entries:
        found.add(entry)
    found.entries = dict(sorted(found.entries.items()))
    return found


def all_rules() -> tuple[type[Rule], ...]:
    """Every rule, by code."""
    return tuple(entry.rule for entry in registry().entries.values())


def _rules_of(named: object, name: str) -> tuple[str, Iterable[type[Rule]]]:
    """The family and the rules that an entry point stands for."""
    if isinstance(named, ModuleType):
        words = (named.__doc__ or name).strip().rstrip(".")
        return words[:1].lower() + words[1:], list(_rules_in(named))
    if not (isinstance(named, type) and issubclass(named, Rule)):
        raise TypeError(f"{named!r} is no rule, and no package of rules")
    if not isinstance(getattr(named, "info", None), RuleInfo):
        raise TypeError(f"{named.__name__} has no info")
    return name, [named]


def _rules_in(package: ModuleType) -> Iterator[type[Rule]]:
    below = [found.name for found in pkgutil.iter_modules(getattr(package, "__path__", ()))]
    modules = [importlib.import_module(f"{package.__name__}.{name}") for name in below]
    for module in (package, *modules):
        for value in vars(module).values():
            is_own = isinstance(value, type) and value.__module__ == module.__name__
            if is_own and issubclass(value, Rule) and hasattr(value, "info"):
                yield value
