"""What `auto` chooses, that a run which goes on keeps it, and that the layout changes no sum."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import surefoot
from surefoot.assembly import compilation
from surefoot.assembly.compilation import Compilation, choose_compilation, keep_compilation
from surefoot.config.load import resolve_settings
from surefoot.config.sections import Settings
from surefoot.core.counting import Pace
from surefoot.core.schedules import UNDECIDED, Undecided
from surefoot.parallel.layout import ALONE

CUDA, CPU = torch.device("cuda"), torch.device("cpu")
LAYERS = nn.ModuleDict({"layers": nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])})
CONVOLUTION = nn.Sequential(nn.Conv2d(3, 4, 3))


@pytest.fixture(autouse=True)
def h200(monkeypatch: pytest.MonkeyPatch) -> None:
    """A card and a compiler that this machine need not have."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    monkeypatch.setattr(
        compilation, "choose_precision", lambda dtype, device: SimpleNamespace(name="bf16")
    )
    monkeypatch.setattr(compilation, "importlib", SimpleNamespace(util=FoundEverywhere))


class FoundEverywhere:
    @staticmethod
    def find_spec(name: str) -> str:
        return name


def settings(**sections: Any) -> Settings:
    train = {"horizon": "10 steps", "micro_batch": 1, **sections.pop("train", {})}
    return resolve_settings({"train": train, **sections}).config


def choose(
    model: nn.Module,
    device: torch.device = CUDA,
    horizon: int | Undecided = 5000,
    flops: float | None = None,
    **sections: Any,
) -> Compilation:
    pace = Pace(samples_per_update=16, flops_per_sample=flops)
    return choose_compilation(model, settings(**sections), device, ALONE, pace, horizon)


def test_a_long_run_on_a_gpu_compiles_equal_layers_one_by_one() -> None:
    assert choose(LAYERS).extent == "blocks"
    assert choose(nn.Linear(4, 4)).extent == "whole"
    assert choose(LAYERS, horizon=UNDECIDED).extent == "blocks"


def test_nothing_is_compiled_on_a_cpu_or_for_a_short_run() -> None:
    assert choose(LAYERS, CPU) == Compilation("off", False, "the device is cpu")
    short = choose(LAYERS, horizon=compilation.MIN_UPDATES_TO_COMPILE - 1)
    assert short.extent == "off"
    assert "a run of 999 updates: too short" in short.reason


@pytest.mark.parametrize(("seconds", "extent"), [(59, "off"), (61, "blocks")])
def test_where_the_operations_are_known_the_estimated_time_counts(
    seconds: float, extent: str
) -> None:
    of_an_update = 989.5e12 * compilation.UNCOMPILED_UTILIZATION * seconds / 100
    assert choose(LAYERS, horizon=100, flops=of_an_update / 16).extent == extent


def test_of_a_small_model_the_launches_count() -> None:
    updates = int(compilation.MIN_SECONDS_TO_COMPILE / compilation.MIN_UPDATE_SECONDS)
    assert choose(LAYERS, horizon=updates - 1, flops=1.0).extent == "off"
    assert choose(LAYERS, horizon=updates, flops=1.0).extent == "blocks"


@pytest.mark.parametrize(
    "memory",
    [
        {"recompute": "budget", "recompute_budget_mib": 10},
        {"offload_activations": "cpu"},
        {"offload_parameters": "cpu"},
    ],
    ids=lambda memory: next(iter(memory)),
)
def test_auto_leaves_what_does_not_go_with_a_compilation(memory: dict[str, Any]) -> None:
    assert choose(LAYERS, memory=memory).extent == "off"


def test_a_loss_in_chunks_goes_with_blocks_alone() -> None:
    assert choose(LAYERS, memory={"loss": "chunked"}).extent == "blocks"
    assert choose(nn.Linear(4, 4), memory={"loss": "chunked"}).extent == "off"


def test_convolutions_have_their_channels_last_on_a_gpu() -> None:
    assert choose(CONVOLUTION).channels_last
    assert not choose(CONVOLUTION, CPU).channels_last
    assert not choose(LAYERS).channels_last
    assert not choose(CONVOLUTION, train={"channels_last": "off"}).channels_last
    assert choose(CONVOLUTION, CPU, train={"channels_last": "on"}).channels_last


def test_what_is_said_is_done() -> None:
    said = choose(LAYERS, CPU, train={"compile": "blocks"})
    assert said == Compilation("blocks", False, "")
    train = said.settle(settings()).train
    assert (train.compile, train.channels_last) == ("blocks", "off")


def test_a_run_that_goes_on_keeps_what_it_began_with() -> None:
    began = Compilation("blocks", True, "a run of 5000 updates")
    assert keep_compilation(settings(), began) == began
    assert Compilation.from_json(began.as_json()) == began
    changed = keep_compilation(settings(train={"compile": "off", "channels_last": "off"}), began)
    assert (changed.extent, changed.channels_last) == ("off", False)


def train(runs: Path, resume: Path | None = None, **train: Any) -> surefoot.RunResult:
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    pictures = torch.randn(16, 3, 8, 8, generator=generator)
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2)
    )
    trainer = surefoot.Trainer(
        model,
        (pictures, torch.arange(16) % 2),
        surefoot.ClassificationTask(2),
        settings={
            "train": {"horizon": "6 steps", "micro_batch": 4, **train},
            "checkpoint": {"every": "2 steps"},
            "log": {"console": "off"},
            "device": "cpu",
        },
        runs=runs,
    )
    return trainer.fit(resume)


def weights(result: surefoot.RunResult) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in result.model.state_dict().items()}


def test_the_layout_of_convolutions_changes_no_more_than_the_order_of_sums(
    tmp_path: Path,
) -> None:
    plain, last = train(tmp_path), train(tmp_path, channels_last="on")
    assert last.model[0].weight.is_contiguous(memory_format=torch.channels_last)
    for name, tensor in weights(plain).items():
        # Six updates in float32: another order of a sum of 27 products.
        torch.testing.assert_close(weights(last)[name], tensor, rtol=1e-4, atol=1e-6)


def test_a_run_with_channels_last_goes_on_bit_by_bit(tmp_path: Path) -> None:
    whole = train(tmp_path, channels_last="on")
    assert whole.folder is not None
    expected = weights(whole)
    again = train(tmp_path, whole.folder / "checkpoints" / "step-00000002", channels_last="on")
    assert all(torch.equal(weights(again)[name], tensor) for name, tensor in expected.items())


def test_a_run_of_before_there_was_a_choice_goes_on_with_auto(tmp_path: Path) -> None:
    began = train(tmp_path, compile="off", channels_last="off")
    assert began.folder is not None
    resumed = train(tmp_path, began.folder / "checkpoints" / "step-00000004")
    assert resumed.step == 6
