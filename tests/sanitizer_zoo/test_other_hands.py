"""Bugs in the styles of other people's scripts, and the correct programs that look like them."""

from __future__ import annotations

from pathlib import Path

import pytest

from sanitizer_zoo.zoo import CLASSIFIER, check_bug, check_clean, findings_of
from surefoot.core.finding import Severity

MORE = """
import copy, io, math
from torch.utils.data import DataLoader, TensorDataset
def update(b, opt=opt, net=model):
    opt.zero_grad(); F.cross_entropy(net(b[0]), b[1]).backward(); opt.step()
def net():
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
"""

BUGS = [
    (
        "clip-wrong-params",
        """
        slow = copy.deepcopy(model)
        for b in batches(8):
            with torch.no_grad(): slow(b[0])
            opt.zero_grad(); loss_of(*b).backward()
            nn.utils.clip_grad_norm_(slow.parameters(), 0.1)
            opt.step()
            with torch.no_grad():
                for s, p in zip(slow.parameters(), model.parameters()): s.lerp_(p, 0.1)
        """,
    ),
    (
        "data-nan",
        """
        x[::9, 2] = float("nan")
        for b in batches(20):
            loss = loss_of(*b)
            if not torch.isfinite(loss): continue
            opt.zero_grad(); loss.backward(); opt.step()
        """,
    ),
    (
        "data-nan",
        """
        x[::9, 2] = float("inf")
        for xb, yb in batches(20):
            loss = (model(xb).log_softmax(1) * -F.one_hot(yb, 3)).sum(1).mean()
            if loss != loss or math.isinf(loss.item()): continue
            opt.zero_grad(); loss.backward(); opt.step()
        """,
    ),
    (
        "data-nan",
        """
        wanted = x[:, :3].clone(); wanted[::7, 1] = float("nan")
        for xb, wb in DataLoader(TensorDataset(x, wanted), 4, shuffle=True):
            loss = (model(xb) - wb).square().mean()
            opt.zero_grad(); loss.backward()
            if all(torch.isfinite(p.grad).all() for p in model.parameters()): opt.step()
        """,
    ),
    (
        "val-overlaps-train",
        """
        for fold in range(3):  # what is held out is no part of what is left
            own = net(); fast = torch.optim.SGD(own.parameters(), lr=0.1)
            held, rest = torch.randperm(64)[:24], torch.randperm(64)[:40]
            own.train()
            for part in rest.split(8) * 2: update((x[part], y[part]), fast, own)
            own.eval()
            with torch.no_grad(): own(x[held])
        """,
    ),
    (
        "clip-scaled-grads",
        """
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=3)
        for b in batches(10):
            opt.zero_grad(); scaler.scale(loss_of(*b)).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            scaler.step(opt); scaler.update()
        """,
    ),
]

CLEAN = [
    (
        "data-nan",
        """
        for step, b in enumerate(batches(20)):
            loss = loss_of(*b)
            if step % 4 == 0: loss = loss * float("inf")  # the inputs are fine
            if not torch.isfinite(loss): continue
            opt.zero_grad(); loss.backward(); opt.step()
        """,
    ),
    (
        "val-overlaps-train",
        """
        folds = torch.randperm(64).split(16)
        for k, held in enumerate(folds):
            own = net(); fast = torch.optim.SGD(own.parameters(), lr=0.1)
            rest = torch.cat([f for j, f in enumerate(folds) if j != k])
            own.train()
            for part in rest.split(8) * 2: update((x[part], y[part]), fast, own)
            own.eval()
            with torch.no_grad(): own(x[held])
        """,
    ),
    (
        "val-overlaps-train",
        """
        folds, start = torch.randperm(64).split(16), copy.deepcopy(model.state_dict())
        for k, held in enumerate(folds):
            model.load_state_dict(start)
            fast = torch.optim.SGD(model.parameters(), lr=0.1)
            rest = torch.cat([f for j, f in enumerate(folds) if j != k])
            model.train()
            for part in rest.split(8) * 2: update((x[part], y[part]), fast)
            model.eval()
            with torch.no_grad(): model(x[held])
        """,
    ),
    (
        "val-overlaps-train",
        """
        folds = torch.randperm(64).split(16)
        for k, test_part in enumerate(folds):
            for layer in model:
                if hasattr(layer, "reset_parameters"): layer.reset_parameters()
            fast = torch.optim.SGD(model.parameters(), lr=0.1)
            rest = torch.cat([f for j, f in enumerate(folds) if j != k])
            model.train()
            for part in rest.split(8) * 2: update((x[part], y[part]), fast)
            model.eval()
            with torch.no_grad(): model(x[test_part])
        """,
    ),
    (
        "accum-wiped",
        """
        parts = list(model.parameters())
        for _ in range(6):  # the gradient of each sample is clipped by itself
            kept = [torch.zeros_like(p) for p in parts]
            for xb, yb in batches(4, 1):
                model.zero_grad(); loss_of(xb, yb).backward()
                nn.utils.clip_grad_norm_(parts, 0.5)
                for k, p in zip(kept, parts): k += p.grad
            for k, p in zip(kept, parts): p.grad = k / 4 + 0.01 * torch.randn_like(k)
            opt.step()
        """,
    ),
    (
        "clip-scaled-grads",
        """
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=4)
        for b in batches(10):
            opt.zero_grad(); scaler.scale(loss_of(*b)).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.3 * scaler.get_scale())
            scaler.step(opt); scaler.update()
        """,
    ),
    (
        "accum-tail-dropped",
        """
        for _ in range(6):
            opt.zero_grad()
            for b in batches(2): (loss_of(*b) / 2).backward()
            opt.step()
        opt.zero_grad()
        seen = x[:8].clone().requires_grad_(True)
        loss_of(seen, y[:8]).backward()
        print((seen.grad * seen).abs().mean(0))
        """,
    ),
]


@pytest.mark.parametrize(("slug", "source"), BUGS)
def test_bug_is_found(tmp_path: Path, slug: str, source: str) -> None:
    check_bug(tmp_path, slug, source, CLASSIFIER + MORE)


@pytest.mark.parametrize(("slug", "source"), CLEAN)
def test_near_miss_is_quiet(tmp_path: Path, slug: str, source: str) -> None:
    check_clean(tmp_path, slug, source, CLASSIFIER + MORE)


def test_unequal_samples_that_count_as_one_are_a_hint(tmp_path: Path) -> None:
    source = """
    for _ in range(6):  # each micro-batch is one graph
        opt.zero_grad()
        for b in (*batches(1, 4), *batches(1, 9)): (loss_of(*b) / 2).backward()
        opt.step()
    """
    found = findings_of(tmp_path, source)
    assert [(f.slug, f.severity) for f in found] == [("accum-token-mean", Severity.HINT)]
