"""Classification."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from surefoot.core.errors import DataError, ModelError
from surefoot.tasks.classification import ClassificationTask

SCORES = torch.tensor([[3.0, 1, 0], [0, 2, 1], [0, 3, 2], [1, 0, 0.5]])
LABELS = torch.tensor([0, 2, 1, -100])
BATCH = (SCORES, LABELS)
MODEL = nn.Identity()
WEIGHTS = torch.tensor([0.5, 2.0, 1.25])


def test_accuracies_are_counts():
    sums = ClassificationTask(3, top_k=(1, 2, 3)).metric_sums(MODEL, BATCH)
    assert sums["accuracy"] == (2, 3)
    assert sums["top_1_accuracy"] == (2, 3)
    assert sums["top_2_accuracy"] == (3, 3)
    assert sums["top_3_accuracy"] == (3, 3)
    assert set(sums) == {"loss", "accuracy", *(f"top_{k}_accuracy" for k in (1, 2, 3))}


def test_the_weight_counts_items():
    assert ClassificationTask(3).weight(BATCH) == 3
    assert ClassificationTask(3).weight((SCORES, torch.full((4,), -100))) == 0


def test_the_weight_with_class_weights_is_their_sum():
    task = ClassificationTask(3, class_weights=WEIGHTS)
    assert task.weight(BATCH) == 0.5 + 1.25 + 2.0
    loss = task.loss_sum(MODEL, BATCH) / task.weight(BATCH)
    torch.testing.assert_close(loss, nn.CrossEntropyLoss(weight=WEIGHTS)(SCORES, LABELS))


def test_a_class_may_weigh_nothing():
    task = ClassificationTask(3, class_weights=torch.tensor([1.0, 0.0, 1.0]))
    assert task.weight(BATCH) == 2
    assert torch.equal(
        task.loss_sum(MODEL, BATCH), ClassificationTask(3).loss_sum(MODEL, (SCORES[:2], LABELS[:2]))
    )


def test_smoothing_is_in_the_loss_and_a_plain_cross_entropy_beside_it():
    task = ClassificationTask(3, label_smoothing=0.1)
    sums = task.metric_sums(MODEL, BATCH)
    smoothed = nn.CrossEntropyLoss(label_smoothing=0.1, reduction="sum")(SCORES, LABELS)
    assert torch.equal(task.loss_sum(MODEL, BATCH), smoothed)
    assert torch.equal(
        sums["cross_entropy"][0], nn.CrossEntropyLoss(reduction="sum")(SCORES, LABELS)
    )
    assert sums["cross_entropy"][1] == 3


def test_classes_of_tokens_and_of_pixels():
    generator = torch.Generator().manual_seed(0)
    task = ClassificationTask(5)
    tokens = torch.randn(2, 3, 5, generator=generator)
    labels = torch.tensor([[0, 1, -100], [4, 3, 2]])
    expected = nn.CrossEntropyLoss(reduction="sum")(tokens.movedim(-1, 1), labels)
    torch.testing.assert_close(task.loss_sum(MODEL, (tokens, labels)), expected)
    assert task.weight((tokens, labels)) == 5
    pixels = torch.randn(2, 5, 3, 4, generator=generator)
    labels = torch.randint(0, 5, (2, 3, 4), generator=generator)
    expected = nn.CrossEntropyLoss(reduction="sum")(pixels, labels)
    torch.testing.assert_close(task.loss_sum(MODEL, (pixels, labels)), expected)
    assert task.weight((pixels, labels)) == 24


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32])
def test_small_integers_are_labels(dtype):
    labels = torch.tensor([0, 2, 1, 1])
    task = ClassificationTask(3, class_weights=WEIGHTS)
    assert task.weight((SCORES, labels.to(dtype))) == task.weight((SCORES, labels))
    assert torch.equal(
        task.loss_sum(MODEL, (SCORES, labels.to(dtype))), task.loss_sum(MODEL, (SCORES, labels))
    )
    assert task.metric_sums(MODEL, (SCORES, labels.to(dtype)))["accuracy"] == (2, 4)


@pytest.mark.parametrize("value", [3, -1, -101])
def test_a_label_out_of_range_is_named(value):
    labels = LABELS.clone()
    labels[2] = value
    with pytest.raises(DataError, match=f"labels holds {value}") as caught:
        ClassificationTask(3).weight((SCORES, labels))
    assert caught.value.batch_position == 2
    assert caught.value.where == "batch position 2"
    assert caught.value.rule == "0 <= index < 3, or -100 where an item does not count"


def test_labels_that_are_no_indices_are_refused():
    with pytest.raises(DataError, match="float32"):
        ClassificationTask(3).weight((SCORES, LABELS.float()))


def test_shapes_that_do_not_fit_are_named():
    with pytest.raises(ModelError, match=r"scores \[4, 3\] do not fit labels \[4\]") as caught:
        ClassificationTask(5).loss_sum(MODEL, BATCH)
    assert "[4, 5]" in caught.value.rule
    with pytest.raises(DataError, match=r"labels have shape \[4, 1\]") as caught:
        ClassificationTask(3).loss_sum(MODEL, (SCORES, LABELS.unsqueeze(-1)))
    assert "[4]" in caught.value.rule
    with pytest.raises(ModelError, match=r"labels \[3\]"):
        ClassificationTask(3).loss_sum(MODEL, (SCORES, LABELS[:3]))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"label_smoothing": 1.0}, "label_smoothing = 1.0"),
        ({"class_weights": torch.ones(2)}, r"shape \[2\]"),
        ({"class_weights": torch.tensor([1.0, -1.0, 1.0])}, "at least 0"),
        ({"class_weights": torch.tensor([1.0, float("nan"), 1.0])}, "finite"),
        ({"top_k": (4,)}, "top_k"),
        ({"top_k": (0,)}, "top_k"),
    ],
)
def test_impossible_tasks_are_refused(arguments, message):
    with pytest.raises(ModelError, match=message):
        ClassificationTask(3, **arguments)


def test_a_target_mask_leaves_items_out():
    x, labels = torch.randn(4, 3), torch.tensor([0, 1, 2, 1])
    batch = {"x": x, "label": labels, "target_mask": torch.tensor([1, 1, 0, 0])}
    task, model = ClassificationTask(3), nn.Linear(3, 3)
    assert task.weight(batch) == 2.0
    kept = {"x": x[:2], "label": labels[:2]}
    torch.testing.assert_close(task.loss_sum(model, batch), task.loss_sum(model, kept))
