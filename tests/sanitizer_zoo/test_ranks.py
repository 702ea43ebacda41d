"""Several ranks: bugs of two styles each, and near-misses; each script runs as rank 0 and 1."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from sanitizer_zoo.ranks import Ranks
from surefoot.core.finding import Finding, Severity

TOGETHER = """
import contextlib, os
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
rank = int(os.environ["RANK"])
meeting = "file://" + os.environ["RANKS_MEET_AT"]
dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=2)
torch.manual_seed(0)
x = torch.randn(96, 6)
y = (x @ torch.randn(6, 3)).argmax(1)
data = TensorDataset(x, y)
def net():
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
def parts(epochs=2, size=8):
    sampler = DistributedSampler(data)
    loader = DataLoader(data, size, sampler=sampler)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        yield from loader
def average(model):
    for p in model.parameters():
        dist.all_reduce(p.grad)
        p.grad /= 2
"""
END = "\ndist.destroy_process_group()\n"

BUGS = [
    (
        "ddp-grads-unsynced",
        """
        model = net()
        for p in model.parameters(): dist.broadcast(p.data, 0)
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        for xb, yb in parts():
            opt.zero_grad()
            F.cross_entropy(model(xb), yb).backward()
            opt.step()
        """,
    ),
    (
        "missing-zero-grad",
        """
        model = net()
        for p in model.parameters(): dist.broadcast(p.data, 0)
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        for xb, yb in parts():
            F.cross_entropy(model(xb), yb).backward()
            average(model)
            opt.step()
        """,
    ),
    (
        "ddp-grads-unsynced",
        """
        model = DDP(net())
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        for xb, yb in parts():
            opt.zero_grad()
            F.cross_entropy(model.module(xb), yb).backward()
            opt.step()
        """,
    ),
    (
        "ddp-grads-unsynced",
        """
        model = net()
        opt = torch.optim.Adam(model.parameters(), lr=0.01)
        class Step:
            def __call__(self, xb, yb):
                opt.zero_grad()
                F.cross_entropy(model(xb), yb).backward()
                opt.step()
                average(model)
        step = Step()
        for b in parts():
            step(*b)
        """,
    ),
    (
        "ddp-no-sync-misuse",
        """
        model = DDP(net())
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        for xb, yb in parts():
            opt.zero_grad()
            with model.no_sync():
                loss = F.cross_entropy(model(xb), yb)
            loss.backward()
            opt.step()
        """,
    ),
    (
        "ddp-no-sync-misuse",
        """
        class Accumulating:
            def __init__(self):
                self.model = DDP(net())
                self.opt = torch.optim.AdamW(self.model.parameters(), lr=0.01)
                self.model.require_backward_grad_sync = False
                self.seen = 0
            def feed(self, xb, yb):
                (F.cross_entropy(self.model(xb), yb) / 3).backward()
                self.seen += 1
                if self.seen % 3 == 0:
                    self.opt.step()
                    self.opt.zero_grad()
        loop = Accumulating()
        for b in parts(3):
            loop.feed(*b)
        """,
    ),
    (
        "ddp-params-diverge",
        """
        torch.manual_seed(100 + rank)
        model = net()
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        for xb, yb in parts():
            opt.zero_grad()
            F.cross_entropy(model(xb), yb).backward()
            average(model)
            opt.step()
        """,
    ),
    (
        "ddp-params-diverge",
        """
        model = DDP(net())
        opt = torch.optim.Adam(model.parameters(), lr=0.01 * (1 + rank))
        for xb, yb in parts():
            loss = F.cross_entropy(model(xb), yb)
            loss.backward()
            opt.step()
            opt.zero_grad()
        """,
    ),
    (
        "ddp-duplicate-data",
        """
        model = DDP(net())
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        for epoch in range(2):
            for xb, yb in DataLoader(data, 8, shuffle=True):
                opt.zero_grad()
                F.cross_entropy(model(xb), yb).backward()
                opt.step()
        """,
    ),
    (
        "ddp-duplicate-data",
        """
        model = net()
        opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        draw = torch.Generator().manual_seed(3)
        for step in range(12):
            at = torch.randint(0, 96, (16,), generator=draw)
            opt.zero_grad()
            F.cross_entropy(model(x[at]), y[at]).backward()
            average(model)
            opt.step()
        """,
    ),
]

CLEAN = [
    (
        "ddp-grads-unsynced",
        """
        model = net()
        for p in model.parameters(): dist.broadcast(p.data, 0)
        if rank == 0:
            opt = torch.optim.SGD(model.parameters(), lr=0.1)
            for xb, yb in parts():
                opt.zero_grad()
                F.cross_entropy(model(xb), yb).backward()
                opt.step()
        """,
    ),
    (
        "ddp-grads-unsynced",
        """
        model = DDP(net())
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        for xb, yb in parts():
            with torch.no_grad():
                model.module(xb)
            opt.zero_grad()
            F.cross_entropy(model(xb), yb).backward()
            opt.step()
        """,
    ),
    (
        "ddp-grads-unsynced",
        """
        model = net()
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        for step, (xb, yb) in enumerate(parts()):
            opt.zero_grad()
            F.cross_entropy(model(xb), yb).backward()
            opt.step()
            if step % 4 == 3:
                with torch.no_grad():
                    for p in model.parameters():
                        dist.all_reduce(p)
                        p /= 2
        """,
    ),
    (
        "ddp-no-sync-misuse",
        """
        model = DDP(net())
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        for i, (xb, yb) in enumerate(parts()):
            held = i % 2 == 0
            with model.no_sync() if held else contextlib.nullcontext():
                (F.cross_entropy(model(xb), yb) / 2).backward()
            if not held:
                opt.step()
                opt.zero_grad()
        """,
    ),
    (
        "ddp-no-sync-misuse",
        """
        model = DDP(net())
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        for xb, yb in parts():
            opt.zero_grad()
            with model.no_sync():
                F.cross_entropy(model(xb), yb).backward()
            average(model)
            opt.step()
        """,
    ),
    (
        "ddp-params-diverge",
        """
        torch.manual_seed(100 + rank)
        model = net()
        for p in model.parameters():
            dist.broadcast(p.data, 0)
        opt = torch.optim.Adam(model.parameters(), lr=0.01)
        for xb, yb in parts():
            opt.zero_grad()
            F.cross_entropy(model(xb), yb).backward()
            average(model)
            opt.step()
        """,
    ),
    (
        "ddp-params-diverge",
        """
        torch.manual_seed(100 + rank)
        model = DDP(net())
        torch.manual_seed(0)
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        for xb, yb in parts():
            opt.zero_grad()
            F.cross_entropy(model(xb), yb).backward()
            opt.step()
        """,
    ),
    (
        "ddp-duplicate-data",
        """
        model = DDP(net())
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        draw = torch.Generator().manual_seed(rank)
        for step in range(12):
            at = torch.randint(0, 96, (16,), generator=draw)
            opt.zero_grad()
            F.cross_entropy(model(x[at]), y[at]).backward()
            opt.step()
        """,
    ),
    (
        "ddp-duplicate-data",
        """
        model = DDP(net())
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        held_out = x[:8]
        for xb, yb in parts():
            opt.zero_grad()
            F.cross_entropy(model(xb), yb).backward()
            opt.step()
            with torch.no_grad():
                model.module(held_out)
        """,
    ),
]


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    both = Ranks()
    yield both
    both.close()


def findings_of(ranks: Ranks, folder: Path, source: str) -> list[Finding]:
    (folder / "script.py").write_text(TOGETHER + textwrap.dedent(source) + END)
    return ranks.findings_of(folder)


@pytest.mark.parametrize(("slug", "source"), BUGS)
def test_bug_is_found(ranks: Ranks, tmp_path: Path, slug: str, source: str) -> None:
    found = [f for f in findings_of(ranks, tmp_path, source) if f.slug == slug]
    assert found, f"{slug} was not found"
    assert all(f.severity is not Severity.HINT for f in found)
    assert all(f.file.endswith("script.py") and f.line for f in found)
    assert all(f.evidence["ranks"] == [0, 1] and f.message and f.fix for f in found)


@pytest.mark.parametrize(("slug", "source"), CLEAN)
def test_near_miss_is_quiet(ranks: Ranks, tmp_path: Path, slug: str, source: str) -> None:
    found = findings_of(ranks, tmp_path, source)
    assert [f.message for f in found if f.slug == slug] == []
    assert [(f.slug, f.message) for f in found if f.severity is not Severity.HINT] == []
