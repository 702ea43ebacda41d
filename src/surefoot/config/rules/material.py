"""Rules that model, data and task fit each other."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from surefoot.config.rules.rule import Rule, broken
from surefoot.config.sections.data import CustomDataSection, DataSection, TextSection
from surefoot.config.sections.models import GPTSection, ModelSection, ResNetSection
from surefoot.config.sections.optimizers import OptimizerSection
from surefoot.config.sections.parts import SamplerSection
from surefoot.config.sections.run import TrainSection
from surefoot.config.sections.schedules import ScheduleSection
from surefoot.config.sections.tasks import CustomTaskSection, FunctionSection, TaskSection
from surefoot.core.doors import CUSTOM, GIVEN
from surefoot.core.errors import Violation

_TASKS_OF_DATA = {
    "text": "generation",
    "digits": "classification",
    "diabetes": "regression",
    "image_folder": "classification",
}
_DATA_OF_MODELS: dict[str, tuple[str, ...]] = {
    "gpt": ("text",),
    "resnet": ("digits", "image_folder", "arrays"),
    "mlp": ("digits", "diabetes", "image_folder", "arrays"),
}


def task_fits_the_data(task: TaskSection, data: DataSection) -> Iterator[Violation]:
    """Labels for one task cannot train the loss of another."""
    wanted = _TASKS_OF_DATA.get(data.kind, task.kind)
    if task.kind != wanted and not isinstance(task, CustomTaskSection | FunctionSection):
        yield broken(
            "task.kind",
            f"{data.kind} data has the labels of {wanted}, not of {task.kind}",
            f"use task.kind={wanted}",
        )


def model_fits_the_data(model: ModelSection, data: DataSection) -> Iterator[Violation]:
    """A decoder reads tokens, other models read numbers."""
    fitting = _DATA_OF_MODELS.get(model.kind, (data.kind,))
    if data.kind not in fitting and not isinstance(data, CustomDataSection):
        yield broken(
            "model.kind",
            f"{model.kind} cannot read {data.kind} data",
            "it reads data of kind " + ", ".join((*fitting, CUSTOM)),
        )


def heads_divide_the_embedding(model: ModelSection) -> Iterator[Violation]:
    """Heads have equal sizes, and rotary positions rotate pairs of dims."""
    if not isinstance(model, GPTSection):
        return
    dim, heads = model.embedding_dim, model.num_heads
    if dim % heads:
        yield broken(
            "model.num_heads",
            f"{heads} heads do not divide model.embedding_dim = {dim}",
            f"use for example {max(n for n in range(1, heads + 1) if dim % n == 0)} heads",
        )
    elif model.positions == "rope" and (dim // heads) % 2:
        yield broken(
            "model.num_heads",
            f"rope needs an even head dim, not {dim // heads}",
            "change model.embedding_dim or model.num_heads, or use model.positions=learned",
        )
    kv_heads = model.num_kv_heads
    if isinstance(kv_heads, int) and heads % kv_heads:
        yield broken(
            "model.num_kv_heads",
            f"{kv_heads} key and value heads do not divide model.num_heads = {heads}",
            "use a divisor of model.num_heads, or as-heads",
        )


def sequences_fit_the_model(model: ModelSection, data: DataSection) -> Iterator[Violation]:
    """The model must support the longest sequence and every token id."""
    if not (isinstance(model, GPTSection) and isinstance(data, TextSection)):
        return
    for key in ("sequence_length", "vocabulary_size"):
        held, needed = getattr(model, key), getattr(data, key)
        if isinstance(held, int) and held < needed:
            yield broken(
                f"model.{key}",
                f"{held} is less than data.{key} = {needed}",
                f"use model.{key}=from-data",
            )


def stages_have_blocks(model: ModelSection) -> Iterator[Violation]:
    """One number of blocks for all stages, or one per stage."""
    if (
        isinstance(model, ResNetSection)
        and isinstance(model.blocks_per_stage, tuple)
        and len(model.blocks_per_stage) != len(model.widths)
    ):
        yield broken(
            "model.blocks_per_stage",
            f"{len(model.blocks_per_stage)} numbers for {len(model.widths)} stages (model.widths)",
            "give one number, or one for each stage",
        )


def files_have_a_path(data: DataSection) -> Iterator[Violation]:
    """Text files need a path; the standard library's own source needs none."""
    if not isinstance(data, TextSection):
        return
    if data.source == "files" and data.path == "none":
        yield broken("data.path", "data.source is files, and data.path is not set", "add data.path")
    if data.source == "stdlib" and data.path != "none":
        yield broken(
            "data.path",
            f"{data.path!r} is given, and data.source is stdlib, which reads no path",
            "use data.source=files",
        )


def given_parts_come_from_python(
    model: ModelSection,
    optimizer: OptimizerSection,
    schedule: ScheduleSection,
    sampler: SamplerSection,
    train: TrainSection,
) -> Iterator[Violation]:
    """A recipe holds no objects: `given` stands in the configuration of a run of Python's."""
    sections: dict[str, Any] = {
        "optimizer": optimizer,
        "schedule": schedule,
        "sampler": sampler,
        "train.clip": train.clip,
    }
    for path, section in sections.items():
        if section.kind == GIVEN:
            yield broken(
                f"{path}.kind",
                "given stands for an object of Python code, and a recipe holds none",
                f"write {path}.kind=custom and {path}.target=package.module:Name",
            )


RULES: tuple[Rule, ...] = (
    given_parts_come_from_python,
    task_fits_the_data,
    model_fits_the_data,
    heads_divide_the_embedding,
    sequences_fit_the_model,
    stages_have_blocks,
    files_have_a_path,
)
