"""The registry: every part that a recipe may name, ours and those of other packages.

Ours are listed here by their target. Another package lists its own in its `pyproject.toml`: a group
`[project.entry-points."surefoot.optimizers"]` with `name = "package.module:object"`. Both are found
and loaded in the same way, and only requested parts are imported. A name means one part: the order
of installation never decides what a run does.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from enum import Enum
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Final, Protocol, TypeVar

from surefoot.core.errors import RequestError
from surefoot.core.targets import import_target


class Door(Enum):
    """Kinds of parts; the value is the group of the entry points."""

    OPTIMIZERS = "surefoot.optimizers"
    SCHEDULES = "surefoot.schedules"
    CLIPS = "surefoot.clips"
    SAMPLERS = "surefoot.samplers"
    TASKS = "surefoot.tasks"
    METRICS = "surefoot.metrics"
    SOURCES = "surefoot.sources"
    OBSERVERS = "surefoot.observers"
    SINKS = "surefoot.sinks"
    RULES = "surefoot.rules"
    CAUSES = "surefoot.causes"


T = TypeVar("T")
CUSTOM: Final = "custom"
"""The kind of a part that a recipe names by its target."""
GIVEN: Final = "given"
"""The kind of a part that Python code has passed."""

OURS: Final[Mapping[Door, Mapping[str, str]]] = {
    Door.OPTIMIZERS: {
        "adam": "surefoot.optim.registry:adam",
        "adamw": "surefoot.optim.registry:adamw",
        "sgd": "surefoot.optim.registry:sgd",
    },
    Door.SCHEDULES: {
        "constant": "surefoot.core.schedules:Constant",
        "constant_cooldown": "surefoot.core.schedules:ConstantCooldown",
        "inverse_sqrt": "surefoot.core.schedules:InverseSqrt",
        "multi_step": "surefoot.core.schedules:MultiStep",
        "one_cycle": "surefoot.core.schedules:OneCycle",
        "plateau": "surefoot.core.plateau:Plateau",
        "step_decay": "surefoot.core.schedules:StepDecay",
        "warmup_cosine": "surefoot.core.schedules:WarmupCosine",
        "warmup_linear": "surefoot.core.schedules:WarmupLinear",
        "wsd": "surefoot.core.schedules:WarmupStableDecay",
    },
    Door.CLIPS: {"norm": "surefoot.numerics.clipping:ClipNorm"},
    Door.SAMPLERS: {
        "by_length": "surefoot.data.samplers:by_length",
        "curriculum": "surefoot.data.samplers:curriculum",
        "in_order": "surefoot.data.samplers:in_order",
        "shuffled": "surefoot.data.samplers:shuffled",
        "weighted": "surefoot.data.samplers:weighted",
    },
    Door.TASKS: {
        "classification": "surefoot.tasks.classification:ClassificationTask",
        "function": "surefoot.tasks.task:FunctionTask",
        "generation": "surefoot.tasks.generation:GenerationTask",
        "multilabel": "surefoot.tasks.multilabel:MultilabelTask",
        "regression": "surefoot.tasks.regression:RegressionTask",
    },
    Door.SOURCES: {
        "arrays": "surefoot.data.sources.tables:open_arrays",
        "diabetes": "surefoot.data.sources.tables:open_diabetes",
        "digits": "surefoot.data.sources.tables:open_digits",
        "image_folder": "surefoot.data.sources.images:open_image_folder",
        "text": "surefoot.data.sources.text:open_text",
    },
    Door.OBSERVERS: {
        "heartbeat": "surefoot.observe.heartbeat:Heartbeat",
        "stopwatch": "surefoot.observe.stopwatch:Stopwatch",
    },
    Door.SINKS: {
        "csv": "surefoot.observe.csv_sink:CsvSink",
        "tensorboard": "surefoot.observe.sinks:tensorboard",
    },
}
"""Name to target. Audit rules and the doctor's causes are listed by their own packages."""


class ChosenPart(Protocol):
    """A section of a recipe that names a part."""

    @property
    def kind(self) -> str: ...
    @property
    def target(self) -> str: ...


def ours(door: Door) -> dict[str, EntryPoint]:
    """Our own parts, by name."""
    found = OURS.get(door, {})
    return {name: EntryPoint(name, found[name], door.value) for name in sorted(found)}


def brought(door: Door) -> Mapping[str, EntryPoint]:
    """The parts of installed packages by name, sorted; none of them is imported.

    Raises:
        RequestError: two packages use the same name, or one uses a name of ours.
    """
    taken = ours(door)
    found: dict[str, EntryPoint] = {}
    for entry in sorted(entry_points(group=door.value), key=lambda entry: entry.name):
        other = taken.get(entry.name) or found.get(entry.name)
        # An environment may list one installation twice.
        if other is not None and other.value != entry.value:
            raise RequestError(
                f"two packages bring {entry.name!r}: {other.value} and {entry.value}",
                where=f"entry points {door.value}",
                rule="a name means one thing",
                remedy="remove one of the packages, or have it use another name",
            )
        found[entry.name] = entry
    return found


def parts(door: Door) -> dict[str, EntryPoint]:
    """All parts of that kind: ours, then those of other packages.

    Raises:
        RequestError: a name means two parts.
    """
    return {**ours(door), **brought(door)}


def families_and_brought(
    door: Door, package: str, families: Sequence[str]
) -> tuple[list[EntryPoint], str]:
    """Our own modules of parts, then what other packages bring; and why that could not be listed.

    Args:
        package: dotted name of the package that holds our modules.
        families: names of these modules.
    """
    own = [EntryPoint(name, f"{package}.{name}", door.value) for name in families]
    try:
        return [*own, *brought(door).values()], ""
    except RequestError as error:
        return own, str(error)


def is_part(door: Door, name: str) -> bool:
    """Whether there is a part of that name."""
    return name in OURS.get(door, {}) or name in brought(door)


def origin_of(entry: EntryPoint) -> str:
    """The package of a part, with its version: `surefoot` for ours."""
    return "surefoot" if entry.dist is None else f"{entry.dist.name} {entry.dist.version}"


def load_part(door: Door, name: str) -> Any:
    """Imports the part of that name.

    Raises:
        RequestError: there is none, or it cannot be imported.
    """
    entries = ours(door)
    if name not in entries:
        entries |= brought(door)
    if name not in entries:
        raise RequestError(
            f"no installed package brings {name!r}",
            where=f"entry points {door.value}",
            rule=f"there are: {', '.join(entries) or 'none'}",
            remedy=near_name(name, entries)
            or "install the package that brings it, or correct the name",
        )
    try:
        return entries[name].load()
    except (ImportError, AttributeError) as error:
        raise RequestError(
            f"{name!r} cannot be imported: {type(error).__name__}: {error}",
            where=f"{entries[name].value}, entry point {door.value}",
            rule="an entry point names package.module:object",
            remedy="correct or remove the package that brings it",
        ) from error


def find_part(door: Door, chosen: ChosenPart, where: str) -> Any:
    """Imports what a section of a recipe names: its target, or the part of that kind.

    Args:
        where: dotted path of the section.

    Raises:
        RequestError: it is not there, or cannot be imported.
    """
    if chosen.kind == CUSTOM:
        return import_target(chosen.target, f"{where}.target")
    return load_part(door, chosen.kind)


def handed_in(part: T | None, word: str, name: str) -> T:
    """The part that Python code has passed, for a section of `kind: given`.

    Args:
        word: the argument for it, such as `optimizer`.
        name: of the part, as the section has it.

    Raises:
        RequestError: it was not passed again.
    """
    if part is None:
        raise RequestError(
            f"the {word} {name} was handed in by Python code",
            where=f"{word}.kind",
            rule="kind: given stands for an object, which no file holds",
            remedy=f"pass {word}=... again, or name it in the recipe by kind: custom",
        )
    return part


def label_of(door: Door, chosen: ChosenPart) -> str:
    """What a section names, for messages: the target, and the package of a registered part."""
    if chosen.kind in (CUSTOM, GIVEN):
        return chosen.target
    entry = parts(door).get(chosen.kind)
    return chosen.kind if entry is None else f"{entry.value} ({origin_of(entry)})"


def near_name(name: str, names: Sequence[str] | Mapping[str, Any]) -> str:
    """The name that was probably meant, as a question; empty if none is similar."""
    near = difflib.get_close_matches(name, list(names), n=1, cutoff=0.5)
    return f"did you mean {near[0]!r}?" if near else ""
