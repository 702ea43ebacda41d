"""Multi-label classification."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from surefoot.core.errors import DataError, ModelError
from surefoot.tasks.multilabel import MultilabelTask

SCORES = torch.tensor([[2.0, -1.0, 0.5], [-2.0, -0.5, 3.0]])
TARGET = torch.tensor([[1.0, 1.0, 0.0], [0.0, 0.0, 1.0]])
MODEL = nn.Identity()
TASK = MultilabelTask(3)


def test_sum_over_weight_is_torchs_mean():
    mean = TASK.loss_sum(MODEL, (SCORES, TARGET)) / TASK.weight((SCORES, TARGET))
    torch.testing.assert_close(mean, nn.BCEWithLogitsLoss()(SCORES, TARGET))
    weights = torch.tensor([1.0, 3.0, 0.5])
    task = MultilabelTask(3, positive_weights=weights)
    assert task.weight((SCORES, TARGET)) == 6
    torch.testing.assert_close(
        task.loss_sum(MODEL, (SCORES, TARGET)) / 6,
        nn.BCEWithLogitsLoss(pos_weight=weights)(SCORES, TARGET),
    )


def test_metrics_are_counts():
    sums = TASK.metric_sums(MODEL, (SCORES, TARGET))
    assert sums["accuracy"] == (4, 6)
    assert sums["precision"] == (2, 3)
    assert sums["recall"] == (2, 3)
    assert sums["f1"] == (4, 6)
    strict = MultilabelTask(3, threshold=0.7).metric_sums(MODEL, (SCORES, TARGET))
    assert strict["precision"] == (2, 2)
    assert strict["accuracy"] == (5, 6)


def test_where_a_label_begins():
    half = torch.tensor([[0.5, 0.5, 0.51]])
    sums = TASK.metric_sums(MODEL, (torch.tensor([[0.0, -0.1, 0.1]]), half))
    assert sums["precision"] == (1, 2)
    assert sums["recall"] == (1, 1)


def test_masked_elements_do_not_count():
    mask = torch.tensor([[1, 0, 0], [1, 1, 1]])
    batch = {"inputs": SCORES, "labels": TARGET, "target_mask": mask}
    assert TASK.weight(batch) == 4
    sums = TASK.metric_sums(MODEL, batch)
    assert sums["accuracy"] == (4, 4)
    assert sums["precision"] == sums["recall"] == (2, 2)
    chosen = mask.bool()
    torch.testing.assert_close(
        sums["loss"][0],
        nn.BCEWithLogitsLoss(reduction="sum")(SCORES[chosen], TARGET[chosen]),
    )


def test_one_label_may_be_a_row():
    task = MultilabelTask(1)
    row = (SCORES[:, 0], TARGET[:, 0])
    column = (SCORES[:, :1], TARGET[:, :1])
    assert task.weight(row) == task.weight(column) == 2
    assert torch.equal(task.loss_sum(MODEL, row), task.loss_sum(MODEL, column))
    assert torch.equal(
        task.loss_sum(MODEL, (SCORES[:, :1], TARGET[:, 0])), task.loss_sum(MODEL, row)
    )


def test_whole_numbers_are_targets():
    assert TASK.weight((SCORES, TARGET.long())) == 6
    assert torch.equal(
        TASK.loss_sum(MODEL, (SCORES, TARGET.long())), TASK.loss_sum(MODEL, (SCORES, TARGET))
    )


@pytest.mark.parametrize("value", [1.5, -0.25, float("nan")])
def test_a_target_outside_is_named(value):
    target = TARGET.clone()
    target[1, 2] = value
    with pytest.raises(DataError, match=f"target holds {value}") as caught:
        TASK.weight((SCORES, target))
    assert caught.value.batch_position == 1
    assert caught.value.rule == "0.0 <= value <= 1.0"
    mask = torch.tensor([[1, 1, 1], [1, 1, 0]])
    assert TASK.weight({"inputs": SCORES, "target": target, "target_mask": mask}) == 5
    with pytest.raises(DataError, match=f"target holds {value}"):
        TASK.weight({"inputs": SCORES, "target": target, "target_mask": mask.flip(1)})


def test_wrong_shapes_are_named():
    with pytest.raises(DataError, match=r"target has shape \[2\]") as caught:
        TASK.weight((SCORES, torch.tensor([0, 2])))
    assert "[batch, 3]" in caught.value.rule
    with pytest.raises(ModelError, match=r"scores \[2, 2\]"):
        TASK.loss_sum(MODEL, (SCORES[:, :2], TARGET))


@pytest.mark.parametrize(
    "arguments",
    [
        {"positive_weights": torch.ones(2)},
        {"positive_weights": torch.tensor([1.0, -1.0, 1.0])},
        {"threshold": 0.0},
        {"threshold": 1.0},
    ],
)
def test_impossible_tasks_are_refused(arguments):
    with pytest.raises(ModelError):
        MultilabelTask(3, **arguments)
