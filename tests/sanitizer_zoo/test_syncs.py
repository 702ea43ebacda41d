"""Waits for a device, played on a CPU by tensors that say they are elsewhere."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from sanitizer_zoo.zoo import check_bug, check_clean

FAR = """
import torch
from torch import nn
import torch.nn.functional as F
torch.manual_seed(0)
class Far(torch.Tensor):
    device = property(lambda self: torch.device("cuda", 0))
x = torch.randn(64, 6)
y = (x @ torch.randn(6, 3)).argmax(1)
x = x.as_subclass(Far)
model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
opt = torch.optim.SGD(model.parameters(), lr=0.1)
def update():
    at = torch.randint(0, 64, (8,))
    loss = F.cross_entropy(model(x[at]), y[at])
    opt.zero_grad(); loss.backward(); opt.step()
    return loss
"""

BUGS = [
    (
        "sync-every-step",
        """
        total = 0.0
        for _ in range(30):
            total += update().item()
        """,
    ),
    (
        "sync-every-step",
        """
        class Meter:
            def __init__(self):
                self.values = []
            def add(self, value):
                self.values.append(float(value))
        meter = Meter()
        for _ in range(30):
            meter.add(update().detach())
        """,
    ),
    (
        "sync-every-step",
        """
        for step in range(30):
            loss = update()
            if loss > 100:
                raise RuntimeError(step)
        """,
    ),
]

CLEAN = [
    (
        "sync-every-step",
        """
        total = torch.zeros(())
        for step in range(30):
            total = total + update().detach()
            if step % 10 == 9:
                print(total.item())
        """,
    ),
    (
        "sync-every-step",
        """
        x = torch.randn(64, 6)
        for _ in range(30):
            update().item()
        """,
    ),
    (
        "sync-every-step",
        """
        losses = []
        for _ in range(30):
            losses.append(update().detach())
        print([loss.item() for loss in losses])
        """,
    ),
]


@pytest.fixture(autouse=True)
def _a_device_to_wait_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)


@pytest.mark.parametrize(("slug", "source"), BUGS)
def test_bug_is_found(tmp_path: Path, slug: str, source: str) -> None:
    check_bug(tmp_path, slug, source, FAR)


@pytest.mark.parametrize(("slug", "source"), CLEAN)
def test_near_miss_is_quiet(tmp_path: Path, slug: str, source: str) -> None:
    check_clean(tmp_path, slug, source, FAR)
