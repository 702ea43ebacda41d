"""Refuses to train what would train without a word and not as it was meant. Builds nothing."""

from __future__ import annotations

from surefoot.assembly import Material
from surefoot.config.sections import Settings
from surefoot.config.sections.schedules import PlateauSection
from surefoot.core.errors import RequestError
from surefoot.numerics.modes import refuse_evaluation_mode


def check_trainable(material: Material, settings: Settings) -> None:
    """Looks at the modes of the model and at what the rules of the run watch.

    Raises:
        ModelError: the whole model is in evaluation mode.
        RequestError: a rule watches a metric and there is nothing to measure it on.
    """
    refuse_evaluation_mode(material.model)
    watchers = {
        "early_stopping": settings.early_stopping.kind == "on",
        "schedule": isinstance(settings.schedule, PlateauSection),
    }
    for section, watches in watchers.items():
        if watches and not material.validation:
            raise RequestError(
                f"{section} watches a metric, and there is no validation set",
                where=f"{section}.kind",
                rule="a metric is measured on a validation set",
                remedy="give one, or leave this out",
            )
