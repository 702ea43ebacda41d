"""The adapter for plain functions, and what all tasks have in common."""

from __future__ import annotations

import pickle
from contextlib import nullcontext
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from surefoot.core.batches import batch_of_samples
from surefoot.core.errors import DataError, ModelError
from surefoot.models import GPT, MLP, GPTConfig, MLPConfig, ResNet, ResNetConfig
from surefoot.tasks import (
    ClassificationTask,
    FunctionTask,
    GenerationTask,
    MultilabelTask,
    RegressionTask,
    Task,
    count_samples,
)

MODEL = nn.Linear(3, 2)


def squared(model, batch):
    inputs, target = batch
    return F.mse_loss(model(inputs), target, reduction="sum")


def two_terms(model, batch):
    inputs, _ = batch
    return {"fit": squared(model, batch), "size": model(inputs).abs().sum()}


def two_weights(batch):
    return {"fit": float(batch[1].numel()), "size": len(batch[0])}


def batch_of(samples: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return (
        torch.randn(samples, 3, generator=generator),
        torch.randn(samples, 2, generator=generator),
    )


@dataclass
class Named:
    names: list[str]
    x: Tensor


@pytest.mark.parametrize(
    ("batch", "samples"),
    [
        (torch.zeros(4, 2), 4),
        ((torch.zeros(4, 2), torch.zeros(4), torch.tensor(3.0)), 4),
        ({"n": torch.tensor(1), "x": torch.zeros(5, 1)}, 5),
        (Named(["a", "b"], torch.zeros(2)), 2),
        ([{"x": torch.zeros(6, 1)}], 6),
    ],
)
def test_samples_are_counted(batch, samples):
    assert count_samples(batch) == samples


@pytest.mark.parametrize(
    ("batch", "fetched"),
    [
        ((torch.zeros(6, 8, 4), torch.zeros(8)), 8),  # Time first.
        (torch.zeros(6, 8, 4), 8),
        ({"edges": torch.zeros(2, 30), "x": torch.zeros(24, 4), "y": torch.zeros(8)}, 8),
        ({"edges": torch.zeros(2, 30), "x": torch.zeros(24, 4)}, 8),
        ((torch.zeros(8, 2), torch.zeros(8)), 8),
        (None, 8),
    ],
)
def test_samples_that_were_fetched_count_whatever_the_shapes(batch, fetched):
    with batch_of_samples(fetched):
        assert count_samples(batch) == fetched
        assert FunctionTask(squared).weight(batch) == fetched


@pytest.mark.parametrize(
    ("batch", "fetched", "said"),
    [
        ((torch.zeros(32, 2), torch.zeros(32)), 1, "1 sample.s. were fetched, .* begins with 32"),
        ({"nodes": torch.zeros(24, 4)}, 8, "begins with 24"),
        ((torch.zeros(6, 8, 4), torch.zeros(8)), None, "begin with 6, 8"),
    ],
)
def test_a_batch_that_leaves_it_open_is_refused(batch, fetched, said):
    known = nullcontext() if fetched is None else batch_of_samples(fetched)
    with known, pytest.raises(DataError, match=said) as caught:
        count_samples(batch)
    assert "weight_fn" in caught.value.remedy


@pytest.mark.parametrize("batch", [None, (), {"x": torch.tensor(1.0)}, 3])
def test_what_cannot_be_counted_is_refused(batch):
    with pytest.raises(DataError, match="cannot count"):
        count_samples(batch)


def test_a_plain_function_is_a_task():
    task = FunctionTask(squared)
    batch = batch_of(5)
    assert isinstance(task, Task)
    assert task.weight(batch) == 5.0
    assert torch.equal(task.loss_sum(MODEL, batch), squared(MODEL, batch))
    assert (task.unit, task.deciding_metric) == ("samples", ("loss", "min"))


def test_own_metrics_are_sums():
    task = FunctionTask(
        squared,
        weight_fn=lambda batch: batch[1].numel(),
        metrics={"mae": lambda model, b: ((model(b[0]) - b[1]).abs().sum(), b[1].numel())},
        unit="elements",
        deciding_metric=("mae", "min"),
    )
    batch = batch_of(5)
    sums = task.metric_sums(MODEL, batch)
    assert sums["loss"][1] == task.weight(batch) == 10.0
    assert torch.equal(sums["loss"][0], squared(MODEL, batch))
    assert not sums["loss"][0].requires_grad and not sums["mae"][0].requires_grad
    assert sums["mae"][1] == 10


def test_several_terms_keep_their_names():
    task = FunctionTask(two_terms, weight_fn=two_weights)
    batch = batch_of(5)
    assert task.weight(batch) == {"fit": 10.0, "size": 5.0}
    assert set(task.loss_sum(MODEL, batch)) == {"fit", "size"}
    sums = task.metric_sums(MODEL, batch)
    assert {name: pair[1] for name, pair in sums.items()} == {"loss/fit": 10.0, "loss/size": 5.0}


def test_half_precision_losses_are_widened():
    task = FunctionTask(lambda model, batch: model(batch[0]).bfloat16().sum())
    assert task.loss_sum(MODEL, batch_of(2)).dtype == torch.float32
    task = FunctionTask(lambda model, batch: model(batch[0]).double().sum())
    assert task.loss_sum(MODEL, batch_of(2)).dtype == torch.float64


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda model, batch: model(batch[0]), r"shape \[2, 2\]"),
        (lambda model, batch: 1.0, "returned a float"),
        (lambda model, batch: torch.tensor(1), "int64"),
        (lambda model, batch: {"a": model(batch[0])}, r"shape \[2, 2\]"),
    ],
)
def test_a_loss_is_one_scalar(loss, message):
    with pytest.raises(ModelError, match=message) as caught:
        FunctionTask(loss).loss_sum(MODEL, batch_of(2))
    assert caught.value.rule
    named = isinstance(loss(MODEL, batch_of(2)), dict)
    assert caught.value.where == ("term 'a'" if named else "")


@pytest.mark.parametrize("weight", [-1.0, float("nan"), float("inf")])
def test_a_weight_is_a_count(weight):
    with pytest.raises(DataError, match="weight_fn returned"):
        FunctionTask(squared, weight_fn=lambda batch: weight).weight(batch_of(2))
    with pytest.raises(DataError, match="weight_fn returned") as caught:
        FunctionTask(squared, weight_fn=lambda batch: {"a": weight}).weight(batch_of(2))
    assert "'a'" in caught.value.where
    assert FunctionTask(squared, weight_fn=lambda batch: 0).weight(batch_of(2)) == 0.0
    assert FunctionTask(squared, weight_fn=lambda batch: 0.5).weight(batch_of(2)) == 0.5


@pytest.mark.parametrize(("loss", "weight"), [(two_terms, count_samples), (squared, two_weights)])
def test_terms_must_match(loss, weight):
    with pytest.raises(ModelError, match="do not match"):
        FunctionTask(loss, weight_fn=weight).metric_sums(MODEL, batch_of(2))


def test_a_metric_cannot_take_the_name_of_the_loss():
    task = FunctionTask(squared, metrics={"loss": lambda model, batch: (torch.ones(()), 1.0)})
    with pytest.raises(ModelError, match="'loss'"):
        task.metric_sums(MODEL, batch_of(2))


def gpt() -> GPT:
    return GPT(
        GPTConfig.llama(
            vocabulary_size=7,
            sequence_length=6,
            num_layers=1,
            num_heads=2,
            num_kv_heads=1,
            embedding_dim=8,
        )
    )


def mlp(out_features: int) -> MLP:
    return MLP(MLPConfig(in_features=4, hidden=(8,), out_features=out_features))


def cases():
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 7, (8, 6), generator=generator)
    labels = ids.clone()
    for row in range(8):
        labels[row, row % 5 + 1 :] = -100
    features = torch.randn(8, 4, generator=generator, dtype=torch.float64)
    classes = torch.tensor([0, 2, -100, 1, 1, 0, -100, 2])
    numbers = torch.randn(8, 3, generator=generator, dtype=torch.float64)
    mask = torch.tensor([1, 1, 0, 1, 0, 1, 1, 1]).bool()
    documents = torch.tensor([[0, 0, 1, 1, 1, 2]]).expand(8, 6)
    pictures = features.view(8, 1, 2, 2)
    weights = torch.tensor([0.3, 2.0, 0.9])
    resnet = ResNet(ResNetConfig(in_channels=1, num_classes=3, widths=(4,), blocks_per_stage=1))
    return {
        "generation": (GenerationTask(7), gpt(), {"input_ids": ids, "labels": labels}),
        "generation documents": (
            GenerationTask(7, bytes_per_token=torch.arange(7)),
            gpt(),
            {"input_ids": ids, "document_ids": documents},
        ),
        "classification": (ClassificationTask(3), mlp(3), (features, classes)),
        "classification weighted": (
            ClassificationTask(3, label_smoothing=0.1, class_weights=weights, top_k=(2,)),
            resnet.eval(),
            (pictures, classes),
        ),
        "mse": (RegressionTask(), mlp(3), (features, numbers)),
        "mae": (
            RegressionTask("mae"),
            mlp(3),
            {"inputs": features, "target": numbers, "target_mask": mask},
        ),
        "huber": (RegressionTask("huber", delta=0.5), mlp(3), (features, numbers)),
        "multilabel": (
            MultilabelTask(3, positive_weights=weights),
            mlp(3),
            {"inputs": features, "target": (numbers > 0).double(), "target_mask": mask},
        ),
        "function": (
            FunctionTask(lambda model, b: F.mse_loss(model(b[0]), b[1], reduction="sum")),
            mlp(3),
            (features, numbers),
        ),
    }


CASES = pytest.mark.parametrize("case", list(cases()))


def piece(batch, rows):
    if isinstance(batch, dict):
        return {name: value[rows] for name, value in batch.items()}
    return tuple(value[rows] for value in batch)


@CASES
@pytest.mark.parametrize("sizes", [[3, 5], [1] * 8, [2, 1, 4, 1]])
def test_sums_over_any_split_are_the_whole(case, sizes):
    task, model, batch = cases()[case]
    model = model.double()
    pieces = [piece(batch, rows) for rows in torch.arange(8).split(sizes)]
    assert sum(task.weight(part) for part in pieces) == pytest.approx(task.weight(batch), rel=1e-15)
    whole = task.loss_sum(model, batch)
    total = sum(task.loss_sum(model, part) for part in pieces)
    assert total.dtype == torch.float64
    torch.testing.assert_close(total, whole, rtol=1e-12, atol=0)
    parameters = list(model.parameters())
    for found, expected in zip(
        torch.autograd.grad(total, parameters),
        torch.autograd.grad(whole, parameters),
        strict=True,
    ):
        assert (found - expected).norm() <= 1e-12 * max(expected.norm(), 1e-3)
    totals = {name: [0.0, 0.0] for name in task.metric_sums(model, batch)}
    for part in pieces:
        for name, pair in task.metric_sums(model, part).items():
            totals[name] = [old + float(new) for old, new in zip(totals[name], pair, strict=True)]
    for name, pair in task.metric_sums(model, batch).items():
        assert totals[name] == pytest.approx([float(value) for value in pair], rel=1e-12), name


@CASES
def test_the_loss_metric_is_the_training_loss(case):
    task, model, batch = cases()[case]
    model = model.double()
    loss, weight = task.metric_sums(model, batch)["loss"]
    assert torch.equal(loss, task.loss_sum(model, batch))
    assert float(weight) == pytest.approx(task.weight(batch), rel=1e-15)
    assert not loss.requires_grad


@CASES
def test_nothing_waits_for_the_device(case):
    """On the meta device there are no values to look at: every look raises."""
    task, model, batch = cases()[case]
    if case == "function":
        task = FunctionTask(task.loss_fn)
    model = model.double().to("meta")
    batch = (
        {name: value.to("meta") for name, value in batch.items()}
        if isinstance(batch, dict)
        else tuple(value.to("meta") for value in batch)
    )
    task.loss_sum(model, batch).backward()
    task.metric_sums(model, batch)


@CASES
def test_the_loss_is_float32_under_autocast(case):
    task, model, batch = cases()[case]
    batch = (
        {k: v.float() if v.is_floating_point() else v for k, v in batch.items()}
        if isinstance(batch, dict)
        else tuple(v.float() if v.is_floating_point() else v for v in batch)
    )
    with torch.autocast("cpu", torch.bfloat16):
        assert task.loss_sum(model, batch).dtype == torch.float32


@CASES
def test_tasks_reach_worker_processes(case):
    task, model, batch = cases()[case]
    if case == "function":
        return
    task.metric_sums(model.double(), batch)
    copy = pickle.loads(pickle.dumps(task))
    assert copy.weight(batch) == task.weight(batch)
    assert torch.equal(copy.loss_sum(model, batch), task.loss_sum(model, batch))


@CASES
def test_every_task_states_what_it_counts(case):
    task, model, batch = cases()[case]
    assert isinstance(task, Task)
    assert task.unit in ("tokens", "samples", "elements")
    name, direction = task.deciding_metric
    assert name in task.metric_sums(model.double(), batch)
    assert direction in ("min", "max")
