"""Losses, weights and random streams of clean loops are the same bits under the audit."""

from __future__ import annotations

import copy
import hashlib
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset, TensorDataset

from surefoot.sanitizer.session import audit

Loop = Iterator[tuple[Tensor, nn.Module]]
LOOPS: dict[str, Callable[[], Loop]] = {}


def loop(function: Callable[[], Loop]) -> Callable[[], Loop]:
    LOOPS[function.__name__] = function
    return function


def labelled(size: int = 96, features: int = 6, classes: int = 3) -> TensorDataset:
    x = torch.randn(size, features)
    return TensorDataset(x, (x @ torch.randn(features, classes)).argmax(1))


def perceptron() -> nn.Sequential:

    return nn.Sequential(
        nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 3)
    )


@loop
def accumulation_with_a_scaler_and_evaluation() -> Loop:
    model, data = perceptron(), labelled()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.01, total_steps=24)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=3)
    loader = DataLoader(data, 8, shuffle=True)
    for _ in range(4):
        model.train()
        for number, (x, y) in enumerate(loader):
            loss = functional.cross_entropy(model(x), y) / 2
            scaler.scale(loss).backward()
            if number % 2:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
                schedule.step()
            yield loss, model
        model.eval()
        with torch.no_grad():
            yield functional.cross_entropy(model(data.tensors[0]), data.tensors[1]), model


@loop
def adversarial_pair() -> Loop:
    maker, critic = nn.Linear(4, 6), nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1))
    first = torch.optim.Adam(maker.parameters(), lr=1e-3)
    second = torch.optim.Adam(critic.parameters(), lr=1e-3)
    for _ in range(12):
        real, fake = torch.randn(8, 6), maker(torch.randn(8, 4))
        mixed = torch.lerp(real, fake.detach(), torch.rand(8, 1)).requires_grad_()
        (slope,) = torch.autograd.grad(critic(mixed).sum(), mixed, create_graph=True)
        loss = critic(fake.detach()).mean() - critic(real).mean()
        loss = loss + 10 * (slope.norm(dim=1) - 1).square().mean()
        second.zero_grad()
        loss.backward()
        second.step()
        yield loss, critic
        first.zero_grad()
        loss = -critic(fake).mean()
        loss.backward()
        first.step()
        yield loss, maker


@loop
def closures() -> Loop:
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=5)
    x = torch.randn(32, 6)
    for _ in range(6):

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = functional.mse_loss(model(x), x.sum(1, keepdim=True))
            loss.backward()
            return loss

        yield torch.as_tensor(optimizer.step(closure)), model


@loop
def recurrent_with_truncation() -> Loop:
    embed, cell, head = (
        nn.Embedding(20, 8),
        nn.LSTM(8, 12, dropout=0.2, num_layers=2),
        nn.Linear(12, 20),
    )
    model = nn.ModuleList([embed, cell, head])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    ids, state = torch.randint(20, (61, 4)), None
    for start in range(0, 60, 5):
        out, state = cell(embed(ids[start : start + 5]), state)
        loss = functional.cross_entropy(
            head(out).flatten(0, 1), ids[start + 1 : start + 6].flatten()
        )
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_value_(model.parameters(), 0.5)
        optimizer.step()
        state = tuple(s.detach() for s in state)
        yield loss, model


@loop
def averaged_weights_and_statistics() -> Loop:
    model, loader = perceptron(), DataLoader(labelled(), 16, shuffle=True)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3)
    for _ in range(3):
        for x, y in loader:
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(x), y, label_smoothing=0.1)
            loss.backward()
            optimizer.step()
            average.update_parameters(model)
            yield loss, average
        update_bn(loader, average)
        yield loss, average


@loop
def recomputed_activations_in_bfloat16() -> Loop:
    first, second = nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.5)), nn.Linear(16, 3)
    model = nn.ModuleList([first, second])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, nesterov=True, momentum=0.9)
    for x, y in DataLoader(labelled(), 8, shuffle=True):
        with torch.autocast("cpu", torch.bfloat16):
            hidden = checkpoint(first, x, use_reentrant=False)
            loss = functional.cross_entropy(second(hidden).float(), y)
        optimizer.zero_grad(set_to_none=False)
        loss.backward()
        optimizer.step()
        yield loss, model


class Noisy(Dataset[Tensor]):
    """Draws from every stream that a worker has."""

    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> Tensor:
        noise = random.random() + float(numpy.random.rand())
        return torch.randn(6) + noise + index


@loop
def workers_that_draw() -> Loop:
    model = nn.Linear(6, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)

    def seed(worker: int) -> None:
        numpy.random.seed(torch.initial_seed() % 2**32)

    loader = DataLoader(Noisy(), 8, shuffle=True, num_workers=2, worker_init_fn=seed)
    for _ in range(2):
        for x in loader:
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            yield loss, model


@loop
def distilled_by_attention() -> Loop:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
    student, teacher = layer, copy.deepcopy(layer).eval()
    teacher.requires_grad_(False)
    optimizer = torch.optim.Adam(student.parameters(), lr=1e-3, weight_decay=0.0)
    for _ in range(10):
        x = torch.randn(4, 5, 8)
        with torch.no_grad():
            target = teacher(x).softmax(-1)
        loss = functional.kl_div(student(x).log_softmax(-1), target, reduction="batchmean")
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss, student


def digest(values: list[Tensor]) -> str:
    content = hashlib.sha256()
    for value in values:
        content.update(repr((value.dtype, tuple(value.shape))).encode())
        content.update(value.detach().contiguous().numpy().tobytes())
    return content.hexdigest()


def run(name: str) -> Any:
    torch.manual_seed(3)
    random.seed(3)
    numpy.random.seed(3)
    losses, weights = [], []
    for loss, model in LOOPS[name]():
        losses.append(loss.item())
        weights.append(digest(list(model.state_dict().values())))
    streams = digest([torch.get_rng_state()]), random.getstate(), repr(numpy.random.get_state())
    return losses, weights, streams


@pytest.mark.parametrize("level", ["light", "deep"])
@pytest.mark.parametrize("name", LOOPS)
def test_the_audit_changes_no_bit(name: str, level: Any) -> None:
    plain = run(name)
    with audit(level=level) as watch:
        watched = run(name)
    assert watch.trace.internal_errors == []
    assert watch.trace.updates > 5
    assert [f.slug for f in watch.findings if f.severity.value != "hint"] == []
    for before, after in zip(plain, watched, strict=True):
        assert before == after
    assert run(name) == plain


def test_the_comparison_sees_one_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = run("closures")
    monkeypatch.setattr(
        nn.Linear,
        "forward",
        lambda self, x: functional.linear(x, self.weight, self.bias) * (1 + 1e-7),
    )
    assert run("closures")[:2] != plain[:2]
