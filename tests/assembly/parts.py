"""A tiny run, taken apart: what the tests of its assembly build."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from surefoot import FunctionTask
from surefoot.assembly.process import prepare_process
from surefoot.assembly.run_parts import Assembly, Material, assemble
from surefoot.config.load import resolve_settings
from surefoot.config.sections import Settings
from surefoot.data.sources.datasets import as_source

INPUTS = torch.arange(60.0).reshape(20, 3) / 60
TARGETS = INPUTS.sum(1, keepdim=True)


def squared_error_sum(model: nn.Module, batch: Any) -> Tensor:
    return (model(batch[0]) - batch[1]).pow(2).sum()


def settings_of(**sections: dict[str, Any]) -> Settings:
    """Six updates of four samples."""
    train = {"horizon": "6 steps", "micro_batch": 4, **sections.pop("train", {})}
    made = {"device": "cpu", "schedule": {"kind": "constant"}, "log": {"console": "off"}}
    return resolve_settings({**made, **sections, "train": train}).config


def material(model: nn.Module | None = None, **validation: Any) -> Material:
    """A linear layer on twenty samples."""
    torch.manual_seed(0)
    return Material(
        nn.Linear(3, 1) if model is None else model,
        FunctionTask(squared_error_sum),
        as_source((INPUTS, TARGETS), "training data"),
        {name: as_source(data, name) for name, data in validation.items()},
    )


def assembled(**sections: dict[str, Any]) -> Assembly:
    """The parts of such a run, with a validation set."""
    settings = settings_of(**sections)
    made = material(validation=(INPUTS[:8], TARGETS[:8]))
    return assemble(made, settings, prepare_process(settings))
