"""How often one evaluates, logs and saves, and who fetches data, changes no bit of the weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from surefoot.tasks.classification import ClassificationTask
from surefoot.trainer import Trainer

NUM_SAMPLES = 38
CLASSES = 3


class NoisyPoints(Dataset[tuple[Tensor, int]]):
    """Points with noise that is drawn anew each time, from three global random streams."""

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        import random

        import numpy as np

        noise = torch.randn(4) + float(np.random.rand()) + random.random()
        return torch.full((4,), float(index)) / NUM_SAMPLES + 0.1 * noise, index % CLASSES


def make_model() -> nn.Module:
    torch.manual_seed(7)
    return nn.Sequential(
        nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, CLASSES)
    )


def final_state(runs: Path, *, validate: bool = True, **sections: Any) -> dict[str, Tensor]:
    settings: dict[str, Any] = {
        "device": "cpu",
        "train": {"horizon": "3 epochs", "micro_batch": 4, "accumulation": 2},
        "optimizer": {"kind": "adamw", "lr": 1e-2},
        "ema": {"kind": "on", "decay": 0.9},
        "log": {"console": "off"},
    }
    for name, section in sections.items():
        settings[name] = {**settings.get(name, {}), **section}
    model = make_model()
    trainer = Trainer(
        model,
        NoisyPoints(),
        ClassificationTask(CLASSES),
        validation={"a": NoisyPoints(), "b": NoisyPoints()} if validate else None,
        settings=settings,
        runs=runs,
    )
    trainer.fit()
    return model.state_dict()


def assert_same(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    for name, value in ours.items():
        assert torch.equal(value, theirs[name]), name


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensor]:
    return final_state(tmp_path_factory.mktemp("plain"), validate=False)


@pytest.mark.parametrize(
    "choice",
    [
        {"evaluate": {"every": "1 steps"}},
        {"evaluate": {"every": "4 steps", "micro_batch": 7, "weights": "ema"}},
        {"checkpoint": {"every": "1 steps", "keep": 1}},
        {"log": {"console": "plain", "weight_norm_every": "1 steps"}},
        {"loader": {"workers": 1}},
        {"loader": {"workers": 3, "prefetch": 1}, "evaluate": {"every": "2 steps"}},
    ],
    ids=["evaluation", "evaluation of the average", "saving", "logging", "1 worker", "3 workers"],
)
def test_the_weights_are_the_same(
    choice: dict[str, Any], plain: dict[str, Tensor], tmp_path: Path
) -> None:
    assert_same(final_state(tmp_path, **choice), plain)


def test_the_comparison_can_fail(plain: dict[str, Tensor], tmp_path: Path) -> None:
    other = final_state(tmp_path, optimizer={"lr": 1.001e-2})
    assert any(not torch.equal(value, other[name]) for name, value in plain.items())
