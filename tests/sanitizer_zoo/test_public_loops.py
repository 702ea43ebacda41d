"""Shapes of public training loops: what was found in them by mistake, and what was missed."""

from __future__ import annotations

from pathlib import Path

import pytest

from sanitizer_zoo.zoo import check_bug, check_clean

LOADERS = """
import torch
from torch import nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
torch.manual_seed(0)
x = torch.randn(192, 6)
y = (x @ torch.randn(6, 3)).argmax(1)
data = TensorDataset(x[:128], y[:128])
held = TensorDataset(x[128:], y[128:])
def net(): return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))
model = net()
opt = torch.optim.SGD(model.parameters(), lr=0.1)
def fit(xb, yb):
    opt.zero_grad(); F.cross_entropy(model(xb), yb).backward(); opt.step()
class Tokens(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb, self.pos, self.out = nn.Embedding(40, 8), nn.Embedding(16, 8), nn.Linear(8, 40)
        self.rnn = nn.GRU(8, 8, batch_first=True)
    def forward(self, ids, state=None):
        places = torch.arange(ids.shape[1])[None]
        hidden, state = self.rnn(self.emb(ids) + self.pos(places), state)
        return self.out(hidden), state
"""
BUGS = [
    (
        "val-overlaps-train",
        """
        train_loader = DataLoader(data, 16, shuffle=True)
        test_loader = DataLoader(data, 32)
        def accuracy(batches):
            model.eval()
            with torch.no_grad():
                right = sum((model(xb).argmax(1) == yb).sum().item() for xb, yb in batches)
            model.train()
            return right
        for epoch in range(3):
            for xb, yb in train_loader: fit(xb, yb)
            print(accuracy(test_loader))
        """,
    ),
    (
        "labels-not-shifted",
        """
        words = Tokens()
        fast = torch.optim.Adam(words.parameters(), lr=0.01)
        def loss_of(ids):
            return F.cross_entropy(words(ids)[0].flatten(0, 1), ids.flatten())
        for step in range(12):
            fast.zero_grad(); loss_of(torch.randint(0, 40, (8, 12))).backward(); fast.step()
            with torch.no_grad():
                loss_of(torch.randint(0, 40, (8, 12)))
        """,
    ),
    (
        "data-set-epoch",
        """
        sampler = DistributedSampler(data, num_replicas=2, rank=0)
        loader = DataLoader(data, 8, sampler=sampler)
        for epoch in range(3):
            print(next(iter(loader))[0].shape)
            for xb, yb in loader: fit(xb, yb)
        """,
    ),
    (
        "rng-reset-in-loop",
        """
        for epoch in range(4):
            torch.manual_seed(7)
            for _ in range(4):
                at = torch.randint(0, 128, (16,))
                fit(x[at] + 0.1 * torch.randn(16, 6), y[at])
        """,
    ),
]
CLEAN = [
    (
        "data-no-shuffle",
        """
        words = Tokens()
        fast = torch.optim.Adam(words.parameters(), lr=0.01)
        text = torch.randint(0, 40, (8, 97))
        for epoch in range(3):
            state = None
            for at in range(0, 96, 12):
                state = None if state is None else state.detach()
                out, state = words(text[:, at : at + 12], state)
                fast.zero_grad()
                F.cross_entropy(out.flatten(0, 1), text[:, at + 1 : at + 13].flatten()).backward()
                fast.step()
        """,
    ),
    (
        "val-overlaps-train",
        """
        train_loader, val_loader = DataLoader(data, 16, shuffle=True), DataLoader(held, 16)
        def mean_loss(loader, batches=3):
            parts = [F.cross_entropy(model(xb), yb) for _, (xb, yb) in zip(range(batches), loader)]
            return torch.stack(parts).mean().item()
        for epoch in range(2):
            for step, (xb, yb) in enumerate(train_loader):
                fit(xb, yb)
                if step % 4 == 0:
                    model.eval()
                    with torch.no_grad():
                        print(mean_loss(train_loader), mean_loss(val_loader))
                    model.train()
        """,
    ),
    (
        "data-set-epoch",
        """
        sampler = DistributedSampler(data, num_replicas=2, rank=0)
        loader = DataLoader(data, 8, sampler=sampler)
        for epoch in range(3):
            print(next(iter(loader))[0].shape)
            sampler.set_epoch(epoch)
            for xb, yb in loader: fit(xb, yb)
            with torch.no_grad():
                print(sum((model(xb).argmax(1) == yb).sum().item() for xb, yb in loader))
        """,
    ),
    (
        "init-loss-off",
        """
        key = net()
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(8):
            at = torch.randint(0, 128, (16,))
            q, k = model(x[at]), key(x[at]).detach()
            near, far = (q * k).sum(1, keepdim=True), q @ k.roll(1, 0).T
            logits = torch.cat([near, far], 1) / 0.02
            opt.zero_grad()
            F.cross_entropy(logits, torch.zeros(16, dtype=torch.long)).backward()
            opt.step()
        """,
    ),
    (
        "accum-wiped",
        """
        def gradients(xb, yb):
            opt.zero_grad(); F.cross_entropy(model(xb), yb).backward()
        for _ in range(12):
            at = torch.randint(0, 128, (16,))
            gradients(x[at], y[at])
            steps = [0.05 * p.grad / (p.grad.norm() + 1e-9) for p in model.parameters()]
            for p, step in zip(model.parameters(), steps): p.data.add_(step)
            gradients(x[at], y[at])
            for p, step in zip(model.parameters(), steps): p.data.sub_(step)
            opt.step()
        """,
    ),
    (
        "teacher-in-train-mode",
        """
        import copy
        student = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
        slow = copy.deepcopy(student)
        for p in slow.parameters(): p.requires_grad = False
        opt = torch.optim.SGD(student.parameters(), lr=0.1)
        for _ in range(20):
            at = torch.randint(0, 128, (16,))
            with torch.no_grad(): goal = slow(x[at])
            opt.zero_grad(); F.mse_loss(student(x[at].roll(1, 1)), goal).backward(); opt.step()
            for a, b in zip(student.parameters(), slow.parameters()):
                b.data = 0.9 * b.data + 0.1 * a.data
        """,
    ),
    (
        "graph-retained",
        """
        from torch.func import functional_call
        for _ in range(12):
            opt.zero_grad()
            at = torch.randint(0, 128, (16,))
            fast = dict(model.named_parameters())
            for _ in range(10):
                inner = F.cross_entropy(functional_call(model, fast, (x[at],)), y[at])
                found = torch.autograd.grad(inner, list(fast.values()), create_graph=True)
                fast = {k: v - 0.1 * g for (k, v), g in zip(fast.items(), found)}
            F.cross_entropy(functional_call(model, fast, (x[at],)), y[at]).backward()
            opt.step()
        """,
    ),
    (
        "rng-reset-in-loop",
        """
        for fold in range(4):
            torch.manual_seed(7)
            model = net()
            opt = torch.optim.SGD(model.parameters(), lr=0.1)
            for _ in range(6):
                at = torch.randint(0, 128, (16,))
                fit(x[at], y[at])
        """,
    ),
]


@pytest.mark.parametrize(("slug", "source"), BUGS)
def test_bug_is_found(slug: str, source: str, tmp_path: Path) -> None:
    check_bug(tmp_path, slug, source, LOADERS)


@pytest.mark.parametrize(("slug", "source"), CLEAN)
def test_near_miss_is_quiet(slug: str, source: str, tmp_path: Path) -> None:
    check_clean(tmp_path, slug, source, LOADERS)
