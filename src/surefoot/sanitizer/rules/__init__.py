"""The rules. Each module of this package that defines a `Rule` with an `info` is one."""

from __future__ import annotations

import functools
import importlib
import inspect
import pkgutil

from surefoot.sanitizer.rules.base import Rule


@functools.cache
def all_rules() -> tuple[type[Rule], ...]:
    """Every rule, by code."""
    found: dict[str, type[Rule]] = {}
    for module_info in pkgutil.iter_modules(__path__):
        module = importlib.import_module(f"{__name__}.{module_info.name}")
        for value in vars(module).values():
            if (
                inspect.isclass(value)
                and issubclass(value, Rule)
                and value.__module__ == module.__name__
                and hasattr(value, "info")
            ):
                found[value.info.code] = value
    return tuple(found[code] for code in sorted(found))


def rule_rows() -> list[tuple[str, str, str, str, str]]:
    """Code, slug, family, certainty and title of every rule, for a table."""
    return [
        (i.code, i.slug, i.family, i.certainty.value, i.title)
        for i in (rule.info for rule in all_rules())
    ]
