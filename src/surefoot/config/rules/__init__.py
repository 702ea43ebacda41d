"""Rules across the keys of a recipe, each a named function.

A rule takes the sections named by its parameters and yields violations; it is skipped if one of
them is missing or invalid. Rules never change a value. The caller fills in origins.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from surefoot.config.rules import contract, material, memory, run, schedule
from surefoot.config.rules.rule import Rule
from surefoot.core.errors import Violation

RULES: tuple[Rule, ...] = (
    *schedule.RULES,
    *run.RULES,
    *material.RULES,
    *contract.RULES,
    *memory.RULES,
)


def broken_rules(sections: Mapping[str, Any]) -> list[Violation]:
    """Violations of all rules whose sections are present."""
    found: list[Violation] = []
    for rule in RULES:
        names = inspect.signature(rule).parameters
        if all(name in sections for name in names):
            found += rule(**{name: sections[name] for name in names})
    return found
