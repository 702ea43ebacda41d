"""Small runs that every layout must train alike: what is trained, and what is seen of it."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from surefoot.assembly.process import prepare_process
from surefoot.assembly.run_parts import Assembly, Material, assemble
from surefoot.config.load import resolve_settings
from surefoot.core.reports import StepReport
from surefoot.data.order import Cursor
from surefoot.data.sources.datasets import as_source
from surefoot.models.gpt import GPT, GPTConfig
from surefoot.state.checkpoint import newest_whole, write_checkpoint
from surefoot.tasks.classification import ClassificationTask
from surefoot.tasks.generation import GenerationTask
from surefoot.tasks.task import Task

NUM_SAMPLES, LENGTH, VOCABULARY = 37, 10, 24
WINDOW = 12
"""Samples of a window over all ranks: an epoch of 37 ends with one alone."""
ACCUMULATION = 3


class UnevenTexts(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Texts of which between 2 and all tokens count, each of one document or of several."""

    def __init__(self, documents: bool = False) -> None:
        self.documents = documents

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(index)
        ids = torch.randint(VOCABULARY, (LENGTH,), generator=generator)
        labels = ids.clone()
        labels[2 + index % (LENGTH - 2) :] = -100
        if not self.documents:
            return {"input_ids": ids, "labels": labels}
        places = torch.arange(LENGTH)
        starts = (places == 3 + index % 4) | (places == 8)
        owner = starts.cumsum(0)
        first = torch.where(starts, places, 0).cummax(0).values
        labels[starts] = -100
        return {
            "input_ids": ids,
            "labels": labels,
            "document_ids": owner,
            "position_ids": places - first,
        }


class Pictures(torch.utils.data.Dataset[tuple[Tensor, int]]):
    """Points of three kinds."""

    def __len__(self) -> int:
        return NUM_SAMPLES - 1

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        generator = torch.Generator().manual_seed(index)
        return torch.randn(6, generator=generator), index % 3


def small_gpt(**changes: Any) -> GPT:
    fields: dict[str, Any] = {
        "vocabulary_size": VOCABULARY,
        "sequence_length": LENGTH,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "embedding_dim": 16,
        "feedforward_dim": 24,
        "tied": False,
    }
    return GPT(GPTConfig(**(fields | changes)))


def small_classifier() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


@dataclass
class Seen:
    """What a run showed."""

    losses: list[float]
    norms: list[float]
    counts: list[tuple[int, int, int, float]]
    """Step, samples, tokens and weight after each update."""
    weights: dict[str, Tensor]
    metrics: dict[str, float]
    weight_norms: list[float]
    terms: list[dict[str, float]]
    """Of a loss of several terms, after each update."""


class Recorder:
    def __init__(self) -> None:
        self.reports: list[StepReport] = []

    def on_step(self, report: StepReport) -> None:
        self.reports.append(report)

    def on_eval(self, report: Any) -> None: ...

    def on_event(self, event: Any) -> None: ...

    def close(self) -> None: ...


def settings_of(data_ranks: int = 1, **sections: Any) -> dict[str, Any]:
    """The same windows for any number of data-parallel ranks."""
    return {
        "train": {
            "horizon": "20 steps",
            "micro_batch": WINDOW // ACCUMULATION // data_ranks,
            "accumulation": ACCUMULATION,
            "clip_norm": 0.5,
        },
        "device": "cpu",
        "optimizer": {"kind": "adamw", "lr": 3e-3, "weight_decay": 0.1},
        "schedule": {"kind": "constant", "warmup": 2},
        "precision": {"dtype": "fp32"},
        "evaluate": {"micro_batch": 4},
        **sections,
    }


def assembled(
    kind: str, settings: Mapping[str, Any], dtype: torch.dtype = torch.float64, **model: Any
) -> Assembly:
    resolved = resolve_settings(settings).config
    process = prepare_process(resolved)
    task: Task
    is_text = kind in ("gpt", "documents")
    if is_text:
        built: nn.Module = small_gpt(**model)
        data: Any = UnevenTexts(documents=kind == "documents")
        task = GenerationTask(VOCABULARY)
    else:
        built, data, task = small_classifier(), Pictures(), ClassificationTask(3)
    source = as_source(data, "training data")
    if dtype is torch.float64 and not is_text:
        built = nn.Sequential(AsDouble(), built)
    material = Material(built.to(dtype), task, source, {"validation": source})
    return assemble(material, resolved, process)


class AsDouble(nn.Module):
    def forward(self, inputs: Tensor) -> Tensor:
        return inputs.double()


def whole(tensor: Tensor) -> Tensor:
    """A copy of a tensor as one process would hold it."""
    if isinstance(tensor, DTensor):
        tensor = tensor.full_tensor()
    return tensor.detach().clone()


def train(
    kind: str,
    settings: Mapping[str, Any],
    num_updates: int = 20,
    dtype: torch.dtype = torch.float64,
    evaluate: bool = True,
    **model: Any,
) -> Seen:
    """Trains on the ranks that there are."""
    assembly = assembled(kind, settings, dtype, **model)
    trainable = assembly.trainable
    recorder = Recorder()
    update = assembly.make_update((recorder,))
    with closing(assembly.open_windows(Cursor())) as windows:
        for _ in range(num_updates):
            update(next(windows))
        update.parts.log.settle()
    metrics: dict[str, float] = {}
    if evaluate:
        (report,) = assembly.evaluator.run(num_updates)
        metrics = {**report.metrics, "samples": report.samples, "weight": report.weight}
    assembly.close()
    return seen_of(recorder.reports, trainable.state.model, metrics)


def seen_of(reports: list[StepReport], model: nn.Module, metrics: dict[str, float]) -> Seen:
    """What an observer has seen, and the weights as one process would hold them."""
    state = model.state_dict()
    return Seen(
        [r.loss for r in reports],
        [r.grad_norm for r in reports],
        [(r.step, r.samples, r.tokens, r.weight) for r in reports],
        {name: whole(tensor) for name, tensor in state.items()},
        metrics,
        [r.weight_norm for r in reports if r.weight_norm is not None],
        [dict(r.terms) for r in reports],
    )


def train_on(
    settings: Mapping[str, Any], folder: str, until: int, *, resume: bool, **model: Any
) -> Seen:
    """Trains a GPT up to an update and saves; with `resume` from the newest checkpoint there."""
    assembly = assembled("gpt", settings, **model)
    trainable = assembly.trainable
    recorder = Recorder()
    update = assembly.make_update((recorder,))
    ranks = assembly.place.ranks
    if resume:
        _, _, snapshot, refused = newest_whole(Path(folder), ranks)
        assert not refused
        trainable.state.restore(snapshot)
    progress = trainable.state.progress
    with closing(assembly.open_windows(progress.cursor)) as windows:
        while update.parts.log.settle() < until:
            update(next(windows))
    write_checkpoint(Path(folder), until, trainable.state.capture(metrics=0), {}, ranks=ranks)
    (report,) = assembly.evaluator.run(until)
    assembly.close()
    return seen_of(recorder.reports, trainable.state.model, dict(report.metrics))
