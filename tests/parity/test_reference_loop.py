"""The update equals the naive reference loop, bit for bit, and the reference equals plain torch."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from reference import loop as reference
from surefoot.core.schedules import WarmupCosine
from surefoot.models.gpt import GPT, GPTConfig
from surefoot.models.mlp import MLP, MLPConfig
from surefoot.models.resnet import ResNet, ResNetConfig
from surefoot.tasks.classification import ClassificationTask
from surefoot.tasks.generation import GenerationTask
from surefoot.tasks.task import Task
from surefoot.train_step import TrainStep

NUM_UPDATES = 50
MAX_NORM = 0.5
VOCABULARY = 17
CLASSES = 5
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "sgd": {"kind": "sgd", "lr": 0.1, "momentum": 0.9, "weight_decay": 0.01},
    "adamw": {"kind": "adamw", "lr": 1e-2, "betas": [0.9, 0.95], "weight_decay": 0.1},
}
SCHEDULE = WarmupCosine(warmup=5, total=NUM_UPDATES, floor=0.1)


def make_model(kind: str) -> nn.Module:
    torch.manual_seed(0)
    if kind == "mlp":
        return MLP(MLPConfig(in_features=6, hidden=(16, 16), out_features=CLASSES))
    if kind == "cnn":
        return ResNet(
            ResNetConfig(in_channels=1, num_classes=CLASSES, widths=(4, 8), blocks_per_stage=1)
        )
    return GPT(
        GPTConfig.llama(
            vocabulary_size=VOCABULARY,
            sequence_length=12,
            num_layers=2,
            num_heads=2,
            num_kv_heads=1,
            embedding_dim=16,
            feedforward_dim=32,
        )
    )


def make_task(kind: str) -> Task:
    return GenerationTask(VOCABULARY) if kind == "gpt" else ClassificationTask(CLASSES)


def make_batch(kind: str, generator: torch.Generator) -> Any:
    """One micro-batch; sizes and numbers of counted tokens differ from one to the next."""
    size = int(torch.randint(1, 5, (), generator=generator))
    if kind == "gpt":
        ids = torch.randint(VOCABULARY, (size, 12), generator=generator)
        labels = ids.clone()
        labels[:, int(torch.randint(3, 12, (), generator=generator)) :] = -100
        return {"input_ids": ids, "labels": labels}
    shape = (size, 6) if kind == "mlp" else (size + 1, 1, 8, 8)
    inputs = torch.randn(shape, generator=generator)
    return inputs, torch.randint(CLASSES, (shape[0],), generator=generator)


def naive_loss_sum(model: nn.Module, batch: Any) -> Tensor:
    if isinstance(batch, dict):
        # The last place predicts nothing. (Cutting it off would sum in another order of terms.)
        following = torch.full_like(batch["labels"], -100)
        following[:, :-1] = batch["labels"][:, 1:]
        logits = model(batch["input_ids"])
        return F.cross_entropy(
            logits.reshape(-1, VOCABULARY), following.reshape(-1), reduction="sum"
        )
    return F.cross_entropy(model(batch[0]), batch[1], reduction="sum")


def naive_weight(batch: Any) -> float:
    if isinstance(batch, dict):
        return float((batch["labels"][:, 1:] != -100).sum())
    return float(len(batch[1]))


def naive_optimizer(model: nn.Module, kind: str) -> torch.optim.Optimizer:
    decay = [p for p in model.parameters() if p.ndim >= 2]
    rest = [p for p in model.parameters() if p.ndim < 2]
    options = OPTIMIZERS[kind]
    groups = [
        {"params": decay, "weight_decay": options["weight_decay"]},
        {"params": rest, "weight_decay": 0.0},
    ]
    if kind == "sgd":
        return torch.optim.SGD(groups, lr=options["lr"], momentum=0.9, fused=True)
    return torch.optim.AdamW(groups, lr=options["lr"], betas=(0.9, 0.95), eps=1e-8, fused=True)


@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("kind", ["mlp", "cnn", "gpt"])
def test_weights_after_fifty_updates_are_bit_equal(
    kind: str, optimizer: str, accumulation: int
) -> None:
    generator = torch.Generator().manual_seed(1)
    windows = [
        [make_batch(kind, generator) for _ in range(accumulation)] for _ in range(NUM_UPDATES)
    ]
    ours, naive = make_model(kind), make_model(kind)
    losses, norms = reference.train(
        naive,
        windows,
        naive_loss_sum,
        naive_weight,
        naive_optimizer(naive, optimizer),
        SCHEDULE,
        MAX_NORM,
    )
    step = TrainStep(
        ours,
        make_task(kind),
        settings={
            "device": "cpu",
            "precision": {"dtype": "fp32"},
            "optimizer": OPTIMIZERS[optimizer],
            "schedule": {"kind": "warmup_cosine", "warmup": 5, "floor": 0.1},
            "train": {"horizon": f"{NUM_UPDATES} steps", "clip_norm": MAX_NORM},
        },
    )
    reports = [*[step(*window) for window in windows][1:], step.settle()]
    assert [report.loss for report in reports if report] == losses
    assert [report.grad_norm for report in reports if report] == norms
    assert any(norm > MAX_NORM for norm in norms), "clipping was at work"
    for (name, mine), (_, theirs) in zip(
        ours.state_dict().items(), naive.state_dict().items(), strict=True
    ):
        assert torch.equal(mine, theirs), name


@pytest.mark.parametrize("kind", ["mlp", "gpt"])
@pytest.mark.parametrize("accumulation", [1, 4])
def test_the_reference_is_one_full_batch_mean_of_torch(kind: str, accumulation: int) -> None:
    generator = torch.Generator().manual_seed(2)
    window = [make_batch(kind, generator) for _ in range(accumulation)]
    model = make_model(kind).double()
    whole = copy.deepcopy(model)
    if kind == "gpt":
        ids = torch.cat([batch["input_ids"] for batch in window])
        labels = torch.cat([batch["labels"] for batch in window])[:, 1:].reshape(-1)
        loss = F.cross_entropy(whole(ids)[:, :-1].reshape(-1, VOCABULARY), labels)
    else:
        window = [(inputs.double(), labels) for inputs, labels in window]
        inputs = torch.cat([batch[0] for batch in window])
        loss = F.cross_entropy(whole(inputs), torch.cat([batch[1] for batch in window]))
    loss.backward()
    total = reference.accumulate(model, window, naive_loss_sum, naive_weight)
    assert float(total) == pytest.approx(float(loss.detach()), rel=1e-12)
    for mine, theirs in zip(model.parameters(), whole.parameters(), strict=True):
        assert mine.grad is not None and theirs.grad is not None
        difference = (mine.grad - theirs.grad).norm() / theirs.grad.norm()
        assert float(difference) <= 1e-12
