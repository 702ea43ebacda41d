"""Losses against torch, their published formulas, and the sum over any split of a batch."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from surefoot.tasks.losses import (
    absolute_error_sum,
    binary_cross_entropy_sum,
    cross_entropy_sum,
    huber_sum,
    sequence_cross_entropy_sum,
    shift_labels,
    smoothed_targets,
    squared_error_sum,
)

LABELS = torch.tensor([0, 4, -100, 2, 2, -100, 1, 3])
CLASS_WEIGHTS = torch.tensor([0.5, 2.0, 1.0, 0.25, 3.0])


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return 3 * torch.randn(shape, generator=generator, dtype=dtype)


def multilabel_targets(*shape: int) -> torch.Tensor:
    return (random(*shape, seed=1) > 0).float()


def huber(predictions, targets, mask=None):
    return huber_sum(predictions, targets, mask, delta=0.7)


ELEMENTWISE = pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (squared_error_sum, nn.MSELoss(reduction="sum")),
        (absolute_error_sum, nn.L1Loss(reduction="sum")),
        (huber, nn.HuberLoss(reduction="sum", delta=0.7)),
        (binary_cross_entropy_sum, nn.BCEWithLogitsLoss(reduction="sum")),
    ],
    ids=["mse", "mae", "huber", "bce"],
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("weights", [None, CLASS_WEIGHTS])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_cross_entropy_equals_torch(dtype, weights, smoothing):
    logits = random(8, 5, dtype=dtype)
    expected = F.cross_entropy(
        logits,
        LABELS,
        weight=None if weights is None else weights.to(dtype),
        label_smoothing=smoothing,
        reduction="sum",
    )
    loss = cross_entropy_sum(logits, LABELS, class_weights=weights, label_smoothing=smoothing)
    assert torch.equal(loss, expected)
    assert loss.dtype == dtype


@pytest.mark.parametrize("weights", [None, CLASS_WEIGHTS])
def test_cross_entropy_over_its_weight_is_torchs_mean(weights):
    logits = random(8, 5)
    counted = LABELS[LABELS != -100]
    weight = len(counted) if weights is None else weights[counted].sum()
    for smoothing in (0.0, 0.1):
        loss = cross_entropy_sum(logits, LABELS, class_weights=weights, label_smoothing=smoothing)
        mean = F.cross_entropy(logits, LABELS, weight=weights, label_smoothing=smoothing)
        torch.testing.assert_close(loss / weight, mean, rtol=1e-6, atol=0)


def test_cross_entropy_is_log_sum_exp_less_the_score():
    logits = random(8, 5, dtype=torch.float64)
    counted = LABELS != -100
    scores, labels = logits[counted], LABELS[counted]
    by_hand = scores.exp().sum(-1).log() - scores[torch.arange(len(labels)), labels]
    torch.testing.assert_close(cross_entropy_sum(logits, LABELS), by_hand.sum(), rtol=1e-12, atol=0)


@pytest.mark.parametrize("smoothing", [0.1, 0.3])
def test_smoothing_is_cross_entropy_to_the_uniform_k_table(smoothing):
    logits = random(8, 5, dtype=torch.float64)
    counted = LABELS != -100
    targets = smoothed_targets(5, smoothing, "uniform_k")[LABELS[counted]]
    by_hand = -(targets * logits[counted].log_softmax(-1)).sum()
    loss = cross_entropy_sum(logits, LABELS, label_smoothing=smoothing)
    torch.testing.assert_close(loss, by_hand, rtol=1e-12, atol=0)


def test_both_forms_of_smoothing():
    uniform = smoothed_targets(3, 0.1, "uniform_k")
    others = smoothed_targets(3, 0.1, "k_minus_1")
    torch.testing.assert_close(
        uniform[1], torch.tensor([0.1 / 3, 0.9 + 0.1 / 3, 0.1 / 3], dtype=torch.float64)
    )
    assert others[1].tolist() == [0.05, 0.9, 0.05]
    torch.testing.assert_close(smoothed_targets(3, 0.1 * 3 / 2, "uniform_k"), others)
    for table in (uniform, others):
        torch.testing.assert_close(table.sum(-1), torch.ones(3, dtype=torch.float64))


def test_next_token_loss_equals_cutting_the_logits():
    logits = random(3, 7, 5).requires_grad_()
    labels = torch.randint(0, 5, (3, 7), generator=torch.Generator().manual_seed(3))
    labels[0, :3] = -100
    labels[2, 5] = -100
    naive = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")
    loss = sequence_cross_entropy_sum(logits, shift_labels(labels))
    # The rows that count for nothing take part in the order of the sum, never in a gradient.
    torch.testing.assert_close(loss, naive, rtol=1e-6, atol=0)
    (expected,) = torch.autograd.grad(naive, logits)
    (found,) = torch.autograd.grad(loss, logits)
    assert torch.equal(found, expected)
    assert (found[:, -1] == 0).all()


def test_labels_move_one_place_left():
    labels = torch.tensor([[5, 6, -100, 8]])
    assert shift_labels(labels).tolist() == [[6, -100, 8, -100]]
    assert shift_labels(labels[:, :1]).tolist() == [[-100]]


@ELEMENTWISE
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_elementwise_losses_equal_torch(ours, theirs, dtype):
    values, targets = random(6, 3, dtype=dtype), multilabel_targets(6, 3).to(dtype)
    assert torch.equal(ours(values, targets), theirs(values, targets))
    assert ours(values, targets).dtype == dtype


def test_elementwise_losses_equal_their_formulas():
    values, targets = random(6, 3, dtype=torch.float64), multilabel_targets(6, 3).double()
    error = values - targets
    assert ((error.abs() < 0.7).any(), (error.abs() > 0.7).any()) == (True, True)
    probability = 1 / (1 + (-values).exp())
    formulas = {
        squared_error_sum: error**2,
        absolute_error_sum: error.abs(),
        huber: torch.where(error.abs() <= 0.7, error**2 / 2, 0.7 * (error.abs() - 0.35)),
        binary_cross_entropy_sum: -(
            targets * probability.log() + (1 - targets) * (1 - probability).log()
        ),
    }
    for loss, formula in formulas.items():
        torch.testing.assert_close(
            loss(values, targets), formula.sum(), rtol=1e-12, atol=0, msg=str(loss)
        )


@ELEMENTWISE
def test_masked_elements_count_for_nothing(ours, theirs):
    values = random(6, 3, dtype=torch.float64).requires_grad_()
    targets = multilabel_targets(6, 3).double()
    mask = random(6, 3, seed=5) > 0
    assert mask.any() and not mask.all()
    expected = theirs(values[mask], targets[mask])
    targets[~mask] = math.nan
    loss = ours(values, targets, mask)
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
    (gradient,) = torch.autograd.grad(loss, values)
    assert (gradient[~mask] == 0).all()
    (expected_gradient,) = torch.autograd.grad(expected, values)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-12, atol=0)


def test_positive_weights_equal_torch():
    values, targets = random(6, 3), multilabel_targets(6, 3)
    weights = torch.tensor([1.0, 4.0, 0.5])
    expected = F.binary_cross_entropy_with_logits(
        values, targets, pos_weight=weights, reduction="sum"
    )
    assert torch.equal(
        binary_cross_entropy_sum(values, targets, positive_weights=weights), expected
    )


@ELEMENTWISE
def test_gradients_of_elementwise_losses(ours, theirs):
    values = random(4, 3, dtype=torch.float64).requires_grad_()
    targets = multilabel_targets(4, 3).double()
    mask = random(4, 3, seed=5) > 0
    assert torch.autograd.gradcheck(lambda x: ours(x, targets), values)
    assert torch.autograd.gradcheck(lambda x: ours(x, targets, mask), values)


@pytest.mark.parametrize("weights", [None, CLASS_WEIGHTS])
def test_gradients_of_cross_entropy(weights):
    logits = random(8, 5, dtype=torch.float64).requires_grad_()
    for smoothing in (0.0, 0.1):

        def loss(scores, smoothing=smoothing):
            return cross_entropy_sum(
                scores, LABELS, class_weights=weights, label_smoothing=smoothing
            )

        assert torch.autograd.gradcheck(loss, logits)
    sequence = random(2, 4, 5, dtype=torch.float64).requires_grad_()
    labels = torch.tensor([[0, 1, 2, 3], [4, -100, 0, 1]])
    assert torch.autograd.gradcheck(
        lambda x: sequence_cross_entropy_sum(x, shift_labels(labels)), sequence
    )


@pytest.mark.parametrize("size", [1e4, -1e4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_finite_at_large_logits(size, dtype):
    logits = torch.zeros(4, 5, dtype=dtype)
    logits[:, 1] = size
    logits.requires_grad_()
    labels = torch.tensor([0, 1, 2, 1])
    targets = torch.tensor([[0.0, 1, 0, 1, 0]]).expand(4, 5)
    for loss in (
        cross_entropy_sum(logits, labels),
        cross_entropy_sum(logits, labels, label_smoothing=0.1),
        sequence_cross_entropy_sum(logits.unsqueeze(0), labels.unsqueeze(0)),
        binary_cross_entropy_sum(logits, targets),
        squared_error_sum(logits, targets),
        absolute_error_sum(logits, targets),
        huber_sum(logits, targets),
    ):
        assert loss.isfinite()
        (gradient,) = torch.autograd.grad(loss, logits)
        assert gradient.isfinite().all()
    # The logit 10,000 has no exponential in float32: without log-sum-exp this is infinite.
    right = cross_entropy_sum(logits[:1].float(), torch.tensor([1 if size < 0 else 0]))
    assert right.item() == pytest.approx(1e4 + (math.log(4) if size < 0 else 0), rel=2e-3)


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("autocast", [False, True])
def test_losses_of_half_precision_scores_are_float32(half, autocast):
    scores = random(8, 5).to(half)
    targets = multilabel_targets(8, 5)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        losses = {
            "cross entropy": (cross_entropy_sum(scores, LABELS), nn.CrossEntropyLoss, LABELS),
            "mse": (squared_error_sum(scores, targets), nn.MSELoss, targets),
            "mae": (absolute_error_sum(scores, targets), nn.L1Loss, targets),
            "huber": (huber_sum(scores, targets), nn.HuberLoss, targets),
            "bce": (binary_cross_entropy_sum(scores, targets), nn.BCEWithLogitsLoss, targets),
        }
    for name, (loss, kind, target) in losses.items():
        assert loss.dtype == torch.float32, name
        assert torch.equal(loss, kind(reduction="sum")(scores.float(), target)), name


def test_double_stays_double_under_autocast():
    scores = random(8, 5, dtype=torch.float64)
    with torch.autocast("cpu", torch.bfloat16):
        assert cross_entropy_sum(scores, LABELS).dtype == torch.float64
        assert squared_error_sum(scores, multilabel_targets(8, 5)).dtype == torch.float64
        assert binary_cross_entropy_sum(scores, multilabel_targets(8, 5)).dtype == torch.float64


def test_wide_targets_do_not_widen_the_loss():
    predictions = random(4, 1).requires_grad_()
    loss = squared_error_sum(predictions, torch.ones(4, 1, dtype=torch.float64))
    loss.backward()
    assert loss.dtype == predictions.grad.dtype == torch.float32
    assert torch.equal(
        absolute_error_sum(predictions, torch.ones(4, 1, dtype=torch.int64)),
        absolute_error_sum(predictions, torch.ones(4, 1)),
    )


@pytest.mark.parametrize("sizes", [[8], [3, 5], [1] * 8, [2, 4, 1, 1]])
def test_sums_over_any_split_are_the_whole(sizes):
    logits = random(8, 5, dtype=torch.float64)
    targets = multilabel_targets(8, 5).double()
    for loss, target in (
        (lambda x, y: cross_entropy_sum(x, y, class_weights=CLASS_WEIGHTS), LABELS),
        (lambda x, y: cross_entropy_sum(x, y, label_smoothing=0.1), LABELS),
        (squared_error_sum, targets),
        (absolute_error_sum, targets),
        (huber_sum, targets),
        (binary_cross_entropy_sum, targets),
    ):
        parts = zip(logits.split(sizes), target.split(sizes), strict=True)
        total = sum(loss(x, y) for x, y in parts)
        torch.testing.assert_close(total, loss(logits, target), rtol=1e-12, atol=0)
