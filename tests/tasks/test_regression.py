"""Regression."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from surefoot.core.errors import DataError, ModelError
from surefoot.tasks.regression import RegressionTask

PREDICTIONS = torch.tensor([[1.0, 2.0], [0.0, -3.0], [5.0, 1.0]])
TARGET = torch.tensor([[0.0, 2.5], [1.0, -3.0], [1.0, 1.0]])
MODEL = nn.Identity()


@pytest.mark.parametrize(
    ("loss", "theirs"),
    [("mse", nn.MSELoss()), ("mae", nn.L1Loss()), ("huber", nn.HuberLoss(delta=2.0))],
)
def test_sum_over_weight_is_torchs_mean(loss, theirs):
    task = RegressionTask(loss, delta=2.0)
    batch = (PREDICTIONS, TARGET)
    assert task.weight(batch) == 6
    mean = task.loss_sum(MODEL, batch) / task.weight(batch)
    torch.testing.assert_close(mean, theirs(PREDICTIONS, TARGET))


def test_metrics_are_sums():
    sums = RegressionTask("huber").metric_sums(MODEL, (PREDICTIONS, TARGET))
    assert sums["loss"] == (nn.HuberLoss(reduction="sum")(PREDICTIONS, TARGET), 6.0)
    assert sums["mse"] == (18.25, 6.0)
    assert sums["mae"] == (6.5, 6.0)
    assert set(sums) == {"loss", "mse", "mae"}


def test_a_column_and_a_row_of_numbers_are_the_same():
    task = RegressionTask()
    column, row = PREDICTIONS[:, :1], TARGET[:, 0]
    assert task.loss_sum(MODEL, (column, row)) == 18.0
    assert task.loss_sum(MODEL, (column[:, 0], row)) == 18.0
    assert task.loss_sum(MODEL, (column, row.unsqueeze(-1))) == 18.0


def test_a_last_dim_of_one_is_no_dim():
    series = torch.arange(6.0).view(2, 3)
    assert RegressionTask().loss_sum(MODEL, (series.unsqueeze(-1), series + 1)) == 6.0
    one_step = (series[:, :1].unsqueeze(-1), series[:, :1] + 1)
    assert RegressionTask().loss_sum(MODEL, one_step) == 2.0


def test_nothing_is_broadcast():
    for predictions, target in (
        (PREDICTIONS[:, 0], TARGET[:, :1]),
        (PREDICTIONS, TARGET[:, :1]),
        (PREDICTIONS, TARGET[:, 0]),
        (PREDICTIONS, TARGET[:2]),
    ):
        with pytest.raises(ModelError, match="do not fit the target") as caught:
            RegressionTask().loss_sum(MODEL, (predictions, target))
        assert str(list(predictions.shape)) in caught.value.what


@pytest.mark.parametrize(
    ("mask", "weight", "loss"),
    [
        ([[1, 0], [1, 1], [0, 0]], 3, 2.0),
        ([1, 1, 0], 4, 2.25),
        ([0, 0, 0], 0, 0.0),
    ],
)
def test_masked_elements_do_not_count(mask, weight, loss):
    task = RegressionTask()
    batch = {"inputs": PREDICTIONS, "target": TARGET, "target_mask": torch.tensor(mask)}
    assert task.weight(batch) == weight
    assert task.loss_sum(MODEL, batch) == loss
    assert task.metric_sums(MODEL, batch)["mse"] == (loss, weight)


def test_a_mask_of_samples_fits_a_column():
    batch = {
        "inputs": PREDICTIONS[:, 0],
        "target": TARGET[:, 0],
        "target_mask": torch.tensor([1, 0, 1]),
    }
    assert RegressionTask().weight(batch) == 2
    column = {**batch, "inputs": PREDICTIONS[:, :1], "target": TARGET[:, :1]}
    assert RegressionTask().loss_sum(MODEL, column) == RegressionTask().loss_sum(MODEL, batch) == 17


def test_a_mask_that_does_not_fit_is_named():
    batch = {"inputs": PREDICTIONS, "target": TARGET, "target_mask": torch.ones(2)}
    with pytest.raises(DataError, match=r"target_mask has shape \[2\]"):
        RegressionTask().weight(batch)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_target_that_is_not_finite_is_named(value):
    target = TARGET.clone()
    target[1, 0] = value
    with pytest.raises(DataError, match=f"target holds {value}") as caught:
        RegressionTask().weight((PREDICTIONS, target))
    assert caught.value.batch_position == 1
    mask = torch.tensor([1, 0, 1])
    batch = {"inputs": PREDICTIONS, "target": target, "target_mask": mask}
    assert RegressionTask().weight(batch) == 4
    assert RegressionTask().loss_sum(MODEL, batch).isfinite()
    batch["target_mask"] = torch.tensor([0, 1, 1])
    with pytest.raises(DataError, match=f"target holds {value}") as caught:
        RegressionTask().weight(batch)
    assert caught.value.batch_position == 1


@pytest.mark.parametrize("arguments", [("rmse",), ("huber", 0.0), ("huber", float("inf"))])
def test_impossible_tasks_are_refused(arguments):
    with pytest.raises(ModelError, match="no regression"):
        RegressionTask(*arguments)
