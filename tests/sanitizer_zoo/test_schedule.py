"""Schedules: bugs of two styles each, and near-misses."""

from __future__ import annotations

from pathlib import Path

import pytest

from sanitizer_zoo.zoo import check_bug, check_clean

SCHEDULES = """
import warnings
warnings.simplefilter("ignore")
from torch.optim import lr_scheduler as s
def update(b):
    opt.zero_grad(); loss_of(*b).backward(); opt.step()
"""

BUGS = [
    (
        "sched-before-optim",
        """
sched = s.ExponentialLR(opt, 0.9)
for b in batches(10):
    opt.zero_grad(); loss_of(*b).backward(); sched.step(); opt.step()
""",
    ),
    (
        "sched-before-optim",
        """
sched = s.StepLR(opt, 2)
for epoch in range(4):
    sched.step()
    for b in batches(3): update(b)
""",
    ),
    (
        "sched-wrong-unit",
        """
sched = s.CosineAnnealingLR(opt, T_max=4)
for epoch in range(4):
    for b in batches(8): update(b); sched.step()
""",
    ),
    (
        "sched-wrong-unit",
        """
sched = s.LinearLR(opt, 1.0, 0.1, total_iters=8)
for i, b in enumerate(batches(32)):
    (loss_of(*b) / 4).backward(); sched.step()
    if i % 4 == 3: opt.step(); opt.zero_grad()
""",
    ),
    (
        "sched-wrong-unit",
        """
class Fit:
    def __init__(self): self.sched = s.MultiStepLR(opt, [2, 3], gamma=0.3)
    def epoch(self):
        model.train()
        for b in batches(6): update(b); self.sched.step()
fit = Fit()
for _ in range(4): fit.epoch()
""",
    ),
    (
        "sched-wrong-unit",
        """
sched = s.ExponentialLR(opt, gamma=0.85)
def score():
    with torch.no_grad(): return loss_of(x, y).item()
for epoch in range(3):
    for b in batches(7): update(b); sched.step()
    print(score())
""",
    ),
    (
        "lr-never-changes",
        """
sched = s.CosineAnnealingLR(opt, T_max=30)
for b in batches(30): update(b)
""",
    ),
    (
        "lr-never-changes",
        """
sched = s.StepLR(opt, 1)
def epoch():
    model.train()
    for b in batches(4): update(b)
for _ in range(3): epoch()
""",
    ),
    (
        "lr-never-changes",
        """
sched, best = s.ExponentialLR(opt, 0.5), []
for _ in range(4):
    for b in batches(3): update(b)
    best.append({k: v.clone() for k, v in model.state_dict().items()})
sched.step()
""",
    ),
    (
        "lr-never-changes",
        """
for b in batches(4): update(b)
sched = s.StepLR(opt, 3)
opt = torch.optim.Adam(model.parameters(), lr=1e-3)
for b in batches(10): update(b); sched.step()
""",
    ),
    (
        "lr-zero",
        """
sched = s.LambdaLR(opt, lambda n: (n + 1) // 8 if n < 8 else 1.0)
for b in batches(20): update(b); sched.step()
""",
    ),
    (
        "lr-zero",
        """
for i, b in enumerate(batches(20)):
    opt.param_groups[0]["lr"] = max(0.0, 0.1 - 0.01 * i)
    update(b)
""",
    ),
]

CLEAN = [
    (
        "sched-wrong-unit",
        """
sched = s.ExponentialLR(opt, gamma=0.97)
for epoch in range(3):
    model.train()
    for b in batches(8): update(b); sched.step()
""",
    ),
    (
        "sched-wrong-unit",
        """
sched = s.MultiStepLR(opt, [12, 18], gamma=0.3)
for epoch in range(4):
    model.train()
    for b in batches(6): update(b); sched.step()
""",
    ),
    (
        "lr-never-changes",
        """
sched = s.StepLR(opt, 1)
for b in batches(9):
    model.train(); update(b)
    with torch.no_grad(): model(x)
""",
    ),
    (
        "lr-never-changes",
        """
sched = s.StepLR(opt, 1)
model.train()
for b in batches(12): update(b)
sched.step(); model.eval()
""",
    ),
    (
        "sched-before-optim",
        """
sched = s.ExponentialLR(opt, 0.99)
for b in batches(10): update(b); sched.step()
""",
    ),
    (
        "sched-before-optim",
        """
sched = s.StepLR(opt, 20)
for _ in range(5): sched.step()  # winds forward to where the run stood
for b in batches(10): update(b); sched.step()
""",
    ),
    (
        "sched-wrong-unit",
        """
sched = s.CosineAnnealingWarmRestarts(opt, T_0=4)
for b in batches(20): update(b); sched.step()
""",
    ),
    (
        "sched-wrong-unit",
        """
sched = s.CosineAnnealingLR(opt, T_max=24)
for b in batches(24): update(b); sched.step()
""",
    ),
    (
        "lr-never-changes",
        """
sched = s.ReduceLROnPlateau(opt)
for b in batches(30): update(b)
sched.step(1.0)
""",
    ),
    (
        "lr-never-changes",
        """
second = torch.optim.SGD(model.parameters(), lr=0.01)
one, two = s.ExponentialLR(opt, 0.99), s.ExponentialLR(second, 0.99)
for i, b in enumerate(batches(20)):
    model.zero_grad(); loss_of(*b).backward()
    (opt, second)[i % 2].step(); (one, two)[i % 2].step()
""",
    ),
    (
        "lr-zero",
        """
sched = s.LambdaLR(opt, lambda n: min(1.0, n / 5))
for b in batches(20): update(b); sched.step()
""",
    ),
    (
        "lr-zero",
        """
sched = s.CosineAnnealingLR(opt, T_max=10)
for b in batches(10): update(b); sched.step()
update(next(batches(1)))
""",
    ),
]


@pytest.mark.parametrize(("slug", "source"), BUGS)
def test_bug_is_found(tmp_path: Path, slug: str, source: str) -> None:
    check_bug(tmp_path, slug, SCHEDULES + source)


@pytest.mark.parametrize(("slug", "source"), CLEAN)
def test_near_miss_is_quiet(tmp_path: Path, slug: str, source: str) -> None:
    check_clean(tmp_path, slug, SCHEDULES + source)
