"""From the model, data and task sections of a recipe to what is trained on what.

The user's own code is imported by name, never evaluated, and printed. Nothing is trained here.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_type_hints

from torch import nn

from surefoot.assembly.run_parts import Material
from surefoot.config.sections import Recipe
from surefoot.config.sections.data import CustomDataSection
from surefoot.core.doors import Door, find_part, label_of
from surefoot.core.errors import ModelError, RequestError
from surefoot.core.targets import bind, call, call_target, import_target
from surefoot.data.sources.base import DataSplits
from surefoot.data.sources.datasets import as_source, split_source
from surefoot.data.sources.images import open_image_folder
from surefoot.data.sources.stream import by_index
from surefoot.data.sources.tables import open_arrays, open_diabetes, open_digits
from surefoot.data.sources.text import TextData, open_text
from surefoot.models.gpt import GPT, GPTConfig
from surefoot.models.mlp import MLP, MLPConfig
from surefoot.models.resnet import ResNet, ResNetConfig
from surefoot.state.weights import start_from
from surefoot.tasks.classification import ClassificationTask
from surefoot.tasks.generation import GenerationTask
from surefoot.tasks.given import MetricFunction, as_task, with_metrics
from surefoot.tasks.multilabel import MultilabelTask
from surefoot.tasks.regression import RegressionTask
from surefoot.tasks.task import FunctionTask, Task, count_samples

FROM_DATA = "from-data"
TOKENIZER_NAME = "tokenizer.json"
MODELS: Mapping[str, tuple[type, Callable[[Any], nn.Module]]] = {
    "gpt": (GPTConfig, GPT),
    "resnet": (ResNetConfig, ResNet),
    "mlp": (MLPConfig, MLP),
}


@dataclass(frozen=True)
class Prepared:
    """What is trained on what, and what the record says of it."""

    material: Material
    facts: Mapping[str, Any] = field(default_factory=dict)
    """What is known of the data, for the record."""
    architecture: Mapping[str, Any] | None = None
    """What `surefoot.load` builds the model from; None for a model that was handed in."""
    text: TextData | None = None
    """The tokenised corpus of a text run."""

    def fingerprints(self) -> dict[str, str]:
        """Fingerprint of the training set and of each validation set."""
        sets = {"train": self.material.train, **self.material.validation}
        return {name: source.fingerprint() for name, source in sets.items()}

    def save_artifacts(self, folder: Path) -> None:
        """Keeps what is needed to use the model: the tokenizer of a text run."""
        if self.text is not None:
            self.text.tokenizer.save(folder / TOKENIZER_NAME)


def prepare_material(
    recipe: Recipe, cache_dir: Path | None = None, *, resuming: bool = False
) -> Prepared:
    """Opens the data, builds task and model (in this order), for a prepared process.

    Args:
        resuming: leave `model.initial_weights` unread; the checkpoint has the weights.

    Raises:
        SurefootError: the data is missing or unreadable, or the model does not fit it.
    """
    data, text = open_data(recipe, cache_dir)
    architecture = resolve_architecture(recipe, data.sizes)
    task = build_task(recipe, {**architecture, **data.sizes}, text)
    task = with_metrics(task, build_metrics(recipe))
    model = build_model(architecture)
    if recipe.model.initial_weights != "none" and not resuming:
        start_from(model, recipe.model.initial_weights)
    freeze(model, recipe.model.frozen)
    material = Material(model, task, data.train, data.validation)
    return Prepared(material, data.facts, architecture, text)


def open_data(recipe: Recipe, cache_dir: Path | None = None) -> tuple[DataSplits, TextData | None]:
    """Opens the data section; the second value is the tokenised corpus of text data.

    Raises:
        MissingDataError: there is nothing at its path.
    """
    section: Any = recipe.data
    fraction: float = section.validation_fraction
    match section.kind:
        case "text":
            text = open_text(
                section.source,
                path=_path_or_none(section.path),
                pattern=section.pattern,
                encoding_errors=section.encoding_errors,
                vocabulary_size=section.vocabulary_size,
                sequence_length=section.sequence_length,
                documents=section.documents,
                validation_fraction=fraction,
                cache_dir=cache_dir,
            )
            return text.splits, text
        case "digits":
            return open_digits(fraction), None
        case "diabetes":
            return open_diabetes(fraction), None
        case "arrays":
            arrays = open_arrays(
                section.path,
                inputs=section.inputs,
                targets=section.targets,
                validation_fraction=fraction,
            )
            return arrays, None
        case "image_folder":
            images = open_image_folder(
                section.path,
                validation_path=None
                if section.validation_path == "none"
                else section.validation_path,
                image_size=section.image_size,
                channels=section.channels,
                validation_fraction=fraction,
            )
            return images, None
        case _:
            return open_custom_data(section), None


def open_custom_data(section: CustomDataSection) -> DataSplits:
    """Somebody's own dataset; its attribute `sizes` (a mapping), if any, feeds `from-data`.

    What returns `DataSplits` has held its validation sets out itself.
    """
    name = label_of(Door.SOURCES, section)
    found = find_part(Door.SOURCES, section, "data")
    made = call(found, (), section.arguments, name, "data.target")
    if isinstance(made, DataSplits):
        return made
    sizes: Mapping[str, int] = getattr(made, "sizes", {})
    train = as_source(made, name)
    if section.validation_target != "none":
        other = call_target(
            section.validation_target, section.validation_arguments, "data.validation_target"
        )
        validation = as_source(other, section.validation_target)
        return DataSplits(train, {"validation": validation}, sizes)
    if section.validation_arguments:
        raise RequestError(
            "data.validation_arguments are given, but no data.validation_target",
            where="data.validation_arguments",
            rule="they are the arguments of what validation_target names",
            remedy="write data.validation_target, or leave them out",
        )
    indexed = by_index(train)
    if indexed is None or not section.validation_fraction:
        return DataSplits(train, {}, sizes)
    train, held_out = split_source(indexed, section.validation_fraction)
    return DataSplits(train, {} if held_out is None else {"validation": held_out}, sizes)


def resolve_architecture(recipe: Recipe, sizes: Mapping[str, int]) -> dict[str, Any]:
    """The model section with every `from-data` filled in: plain values.

    Raises:
        ModelError: the data does not give a size that the model leaves to it.
    """
    section = recipe.model
    fields = section.architecture()
    for name, value in fields.items():
        if value != FROM_DATA:
            continue
        if name not in sizes:
            raise ModelError(
                f"the data does not give '{name}'",
                where=f"model.{name}",
                rule=f"{recipe.data.kind} data gives {', '.join(sorted(sizes)) or 'no size'}",
                remedy=f"write a number at model.{name}",
            )
        fields[name] = sizes[name]
    return {"kind": section.kind, **fields}


def build_model(architecture: Mapping[str, Any]) -> nn.Module:
    """The model that `resolve_architecture` describes, with fresh weights.

    Raises:
        ModelError: its parts do not fit together.
    """
    fields = {name: _tuples(value) for name, value in architecture.items() if name != "kind"}
    kind = architecture["kind"]
    if kind in MODELS:
        config, model = MODELS[kind]
        return model(config(**fields))
    made = call_target(fields["target"], dict(fields["arguments"]), "model.target")
    if not isinstance(made, nn.Module):
        raise ModelError(
            f"{fields['target']} gave a {type(made).__name__}",
            where="model.target",
            rule="a model is a torch.nn.Module",
        )
    return made


def refuse_other_than_modules(architecture: Mapping[str, Any]) -> None:
    """Refuses a model's target that a checkpoint names and that is no module.

    A checkpoint may come from anywhere: what it names is called only where it says itself that it
    makes a module.

    Raises:
        RequestError: the target is neither a `torch.nn.Module` nor a function declared to return
            one.
    """
    if architecture["kind"] in MODELS:
        return
    target = str(architecture["target"])
    found = import_target(target, "the checkpoint's model.target")
    if not isinstance(found, type):
        try:
            found = get_type_hints(found).get("return")
        except (TypeError, NameError):
            found = None
    if not (isinstance(found, type) and issubclass(found, nn.Module)):
        raise RequestError(
            f"the checkpoint's model {target} is not declared to be a module",
            where="manifest.json: about.architecture",
            rule="a checkpoint names a torch.nn.Module, or a function annotated to return one",
            remedy="surefoot.load(RUN, model=M), M of the class and sizes that were trained",
        )


def build_task(recipe: Recipe, sizes: Mapping[str, Any], text: TextData | None = None) -> Task:
    """The task section.

    Args:
        sizes: fields of the model and sizes of the data; the task takes its number of classes from
            them.

    Raises:
        ModelError: a size that the task needs is not among them.
    """
    section: Any = recipe.task
    match section.kind:
        case "generation":
            table = None if text is None else text.bytes_per_token
            return GenerationTask(_size(sizes, "vocabulary_size"), table)
        case "classification":
            return ClassificationTask(
                _size(sizes, "num_classes", "out_features"), label_smoothing=section.label_smoothing
            )
        case "regression":
            return RegressionTask(loss=section.loss, delta=section.delta)
        case "multilabel":
            return MultilabelTask(_size(sizes, "num_labels", "num_classes", "out_features"))
        case "function":
            weight = section.weight
            return FunctionTask(
                import_target(section.loss, "task.loss"),
                count_samples if weight == "samples" else import_target(weight, "task.weight"),
                {n: import_target(t, f"task.metrics.{n}") for n, t in section.metrics.items()},
                section.unit,
            )
        case _:
            name = label_of(Door.TASKS, section)
            found = find_part(Door.TASKS, section, "task")
            return as_task(call(found, (), section.arguments, name, "task.target"))


def build_metrics(recipe: Recipe) -> dict[str, MetricFunction]:
    """The metrics that a recipe adds to those of its task, by name.

    Raises:
        RequestError: one cannot be imported, or does not take its arguments.
    """
    found: dict[str, MetricFunction] = {}
    for name, section in recipe.metrics.items():
        where, label = f"metrics.{name}", label_of(Door.METRICS, section)
        metric = find_part(Door.METRICS, section, where)
        found[name] = bind(metric, 2, section.arguments, label, where)
    return found


def _size(sizes: Mapping[str, Any], *names: str) -> int:
    for name in names:
        if isinstance(sizes.get(name), int):
            size: int = sizes[name]
            return size
    raise ModelError(
        f"the task needs {names[0]}, which neither the model nor the data gives",
        where="task.kind",
        rule=f"one of {', '.join(names)} is a field of the model or a size of the data",
        remedy="use a task of your own (kind: custom) with the number in its arguments",
    )


def freeze(model: nn.Module, patterns: tuple[str, ...]) -> None:
    """Takes the parameters whose names match out of the training.

    Raises:
        ModelError: a pattern matches nothing.
    """
    for pattern in patterns:
        matched = [p for name, p in model.named_parameters() if fnmatch.fnmatchcase(name, pattern)]
        if not matched:
            raise ModelError(
                f"no parameter matches '{pattern}'",
                where="model.frozen",
                rule="each pattern freezes at least one parameter",
                remedy="`surefoot show params RECIPE` lists the names",
            )
        for parameter in matched:
            parameter.requires_grad_(False)


def _path_or_none(path: str) -> str | None:
    return None if path == "none" else path


def _tuples(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
