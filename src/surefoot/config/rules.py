"""Rules across the keys of a recipe, each a named function.

A rule takes the sections that its parameters name and yields what breaks it; it is left out where
one of them is missing or wrong in itself. Rules never change a value. Origins are filled in by the
caller.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from surefoot.core.errors import Violation

Rule = Callable[..., Iterator[Violation]]

RULES: list[Rule] = []


def rule(function: Rule) -> Rule:
    """Register a rule."""
    RULES.append(function)
    return function


def broken_rules(sections: Mapping[str, Any]) -> list[Violation]:
    """Violations of all rules whose sections are there."""
    found: list[Violation] = []
    for check in RULES:
        names = inspect.signature(check).parameters
        if all(name in sections for name in names):
            found += check(**{name: sections[name] for name in names})
    return found
