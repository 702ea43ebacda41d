"""Refuses to train what would train without a word and not as it was meant, or could not be kept.

Builds nothing and writes nothing.
"""

from __future__ import annotations

from surefoot.assembly.run_parts import Assembly, Material
from surefoot.config.sections import Settings
from surefoot.config.sections.schedules import PlateauSection
from surefoot.core.errors import CheckpointError, RequestError
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


def check_keepable(assembly: Assembly) -> None:
    """Looks once at all that a checkpoint of this run will hold: no tensor is copied.

    Every rank calls it; what one cannot keep is raised on all.

    Raises:
        CheckpointError: a part of the state cannot be kept; it is named.
    """
    ranks = assembly.place.ranks
    own: Exception | None = None
    try:
        assembly.trainable.state.capture()
    except Exception as error:
        own = error
    for rank, said in enumerate(ranks.gather("what can be kept", own and str(own))):
        if said is not None:
            raise own or CheckpointError(said, where=f"rank {rank}")
