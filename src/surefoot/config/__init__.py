"""Configuration: frozen typed sections, loaded and checked. Never imports torch."""

from surefoot.config.load import (
    Difference,
    Resolved,
    differences,
    load_recipe,
    recipe_names,
    resolve_recipe,
    resolve_settings,
)
from surefoot.config.sections import Recipe, Settings

__all__ = [
    "Difference",
    "Recipe",
    "Resolved",
    "Settings",
    "differences",
    "load_recipe",
    "recipe_names",
    "resolve_recipe",
    "resolve_settings",
]
