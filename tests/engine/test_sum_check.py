"""A plain loss that does not add up over samples is refused or named before the first update."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from surefoot.core.errors import ModelError
from surefoot.engine.sum_check import FewSamples, check_sums
from surefoot.tasks.task import FunctionTask
from surefoot.train_step import TrainStep
from surefoot.trainer import Trainer

CPU = torch.device("cpu")
SETTINGS: dict[str, Any] = {
    "device": "cpu",
    "train": {"horizon": "2 steps", "micro_batch": 4},
    "log": {"console": "off"},
}


def model_of() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 1))


def batch_of(size: int = 6) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(size, 3, generator=generator), torch.ones(size, 1)


def check(task: FunctionTask, batch: Any, model: nn.Module | None = None) -> str:
    few = FewSamples.cut_from(batch)
    assert few is not None
    return check_sums(model_of() if model is None else model, task, few, CPU)


def mean(model: nn.Module, batch: Any) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


def total(model: nn.Module, batch: Any) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[1], reduction="sum")


def contrastive(model: nn.Module, batch: Any) -> Tensor:
    features = model(batch[0])
    labels = torch.arange(len(features))
    return F.cross_entropy(features @ features.T, labels, reduction="sum")


def fails(model: nn.Module, batch: Any) -> Tensor:
    raise ValueError("not on so few")


@pytest.mark.parametrize("size", [1, 3, 6])
def test_a_mean_is_refused_with_both_numbers(size: int) -> None:
    with pytest.raises(ModelError, match="is a mean, not a sum") as caught:
        check(FunctionTask(mean), batch_of(size))
    assert caught.value.where == "mean" and "reduction" in caught.value.remedy


@pytest.mark.parametrize("loss", [total, contrastive, fails, lambda m, b: 0.0 * total(m, b)])
def test_everything_else_passes(loss: Any) -> None:
    check(FunctionTask(loss), batch_of())


def test_the_term_that_is_a_mean_is_named() -> None:
    task = FunctionTask(lambda m, b: {"fit": total(m, b), "prior": mean(m, b)})
    with pytest.raises(ModelError, match="term 'prior'"):
        check(task, batch_of())


def test_no_trace_is_left() -> None:
    model = model_of()
    before = (torch.get_rng_state().tolist(), [t.tolist() for t in model.state_dict().values()])
    check(FunctionTask(total), batch_of(), model)
    after = (torch.get_rng_state().tolist(), [t.tolist() for t in model.state_dict().values()])
    assert before == after and all(module.training for module in model.modules())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_trainer_and_step_ask_before_the_first_update(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="is a mean"):
        Trainer(model_of(), batch_of(), mean, settings=SETTINGS, runs=tmp_path).fit()
    assert not list(tmp_path.iterdir()), "nothing was started"
    step = TrainStep(model_of(), mean, settings=SETTINGS)
    with pytest.raises(ModelError, match="is a mean"):
        step(batch_of())


def neighbours(model: nn.Module, batch: Any) -> Tensor:
    """Over pairs of samples that stand beside each other: halves add up, another order does not."""
    scores = model(batch[0]).squeeze(1)
    return (scores[0::2] - scores[1::2]).square().sum()


def noisy(model: nn.Module, batch: Any) -> Tensor:
    return total(model, batch) * torch.rand(())


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        (total, ""),
        (noisy, ""),
        (contrastive, "the loss couples the samples of a batch"),
        (neighbours, "the loss goes by the order of the samples in a batch"),
        (lambda m, b: total(m, b) / total(m, b).detach().sqrt(), "couples the samples"),
    ],
)
def test_samples_that_are_coupled_are_named(loss: Any, said: str) -> None:
    found = check(FunctionTask(loss), batch_of())
    assert said in found and bool(said) == bool(found)


def test_what_is_declared_is_not_named_again() -> None:
    task = FunctionTask(contrastive, depends_on_split={"loss": "negatives of the batch"})
    assert check(task, batch_of()) == ""


def columns_and_rows(size: int = 6) -> tuple[Tensor, Tensor]:
    x, y = batch_of(size)
    return x, y.squeeze(1) * torch.arange(size)


def difference(model: nn.Module, batch: Any) -> Tensor:
    return (model(batch[0]) - batch[1]).square().sum()


def builtin(model: nn.Module, batch: Any) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return F.l1_loss(model(batch[0]), batch[1], reduction="sum")


def other_way(model: nn.Module, batch: Any) -> Tensor:
    return (model(batch[0]).squeeze(1) - batch[1].unsqueeze(1) * 1.0).square().sum()


@pytest.mark.parametrize("loss", [difference, builtin])
def test_a_column_against_a_row_is_refused_with_its_shapes(loss: Any) -> None:
    with pytest.raises(ModelError, match=r"\[N, 1\] and \[N\] are broadcast to \[N, N\]"):
        check(FunctionTask(loss), columns_and_rows())


def test_a_metric_that_broadcasts_is_refused_too() -> None:
    def error(model: nn.Module, batch: Any) -> tuple[Tensor, float]:
        return difference(model, batch), float(len(batch[0]))

    def fits(model: nn.Module, batch: Any) -> Tensor:
        return (model(batch[0]).squeeze(1) - batch[1]).square().sum()

    with pytest.raises(ModelError, match="metric 'error'"):
        check(FunctionTask(fits, metrics={"error": error}), columns_and_rows())


class Pairs(nn.Module):
    """Compares all samples with each other inside: that is the model's own business."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        score = self.linear(x)
        return (score - score.squeeze(1).clone()).square().mean(1)


def all_pairs(model: nn.Module, batch: Any) -> Tensor:
    scores = model(batch[0]).squeeze(1)
    return (scores.unsqueeze(1) - batch[1]).square().sum()


@pytest.mark.parametrize(
    ("model", "loss", "batch"),
    [
        (model_of(), all_pairs, columns_and_rows()),
        (Pairs(), lambda m, b: (m(b[0]) - b[1]).square().sum(), columns_and_rows()),
        (nn.Linear(3, 4), lambda m, b: (m(b[0]) - b[1]).square().sum(), batch_of()),
    ],
)
def test_pairs_that_are_meant_pass(model: nn.Module, loss: Any, batch: Any) -> None:
    check(FunctionTask(loss), batch, model)


def test_a_run_names_the_coupling_and_into_how_many_parts_it_splits(tmp_path: Path) -> None:
    settings = {**SETTINGS, "train": {"horizon": "2 steps", "micro_batch": 2, "accumulation": 2}}
    run = Trainer(model_of(), batch_of(), contrastive, settings=settings, runs=tmp_path).fit()
    assert run.folder is not None
    lines = (run.folder / "events.jsonl").read_text().splitlines()
    events = [json.loads(line) for line in lines]
    notes = [event for event in events if "couples the samples" in event["message"]]
    assert len(notes) == 1 and notes[0]["step"] == 0
    assert "splits each window into 2" in notes[0]["message"].lower()
    record = json.loads((run.folder / "record.json").read_text())
    assert any("couples" in row for row in record["extra"]["exactness"]["depends_on_the_split"])


def test_a_step_names_it_before_its_first_update() -> None:
    class Told:
        def __init__(self) -> None:
            self.texts: list[str] = []

        def on_event(self, event: Any) -> None:
            self.texts.append(event.message)

    told = Told()
    step = TrainStep(model_of(), contrastive, settings=SETTINGS, observers=[told])  # type: ignore[list-item]
    step(batch_of())
    assert any("couples the samples" in text for text in told.texts)
