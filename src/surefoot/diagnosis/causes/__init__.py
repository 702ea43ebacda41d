"""The causes. Each module of this package that defines a `Cause` with an `info` is one."""

from __future__ import annotations

import functools
import importlib
import inspect
import pkgutil

from surefoot.diagnosis.causes.base import Cause


@functools.cache
def all_causes() -> tuple[type[Cause], ...]:
    """Every cause, by code."""
    found: dict[str, type[Cause]] = {}
    for module_info in pkgutil.iter_modules(__path__):
        module = importlib.import_module(f"{__name__}.{module_info.name}")
        for value in vars(module).values():
            if (
                inspect.isclass(value)
                and issubclass(value, Cause)
                and value.__module__ == module.__name__
                and hasattr(value, "info")
            ):
                found[value.info.code] = value
    return tuple(found[code] for code in sorted(found))
