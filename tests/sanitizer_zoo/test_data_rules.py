"""Logging and data: bugs of two styles each, and near-misses."""

from __future__ import annotations

from pathlib import Path

import pytest

from sanitizer_zoo.zoo import check_bug, check_clean
from surefoot.sanitizer import events as ev
from surefoot.sanitizer.frames import Site
from surefoot.sanitizer.rules.data.sf702_sync_every_step import SyncEveryStep
from surefoot.sanitizer.trace import Trace

PREAMBLE = """
import random
import numpy as np
import torch
from torch import nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset
from torch.utils.data import Subset, TensorDataset, get_worker_info, random_split
torch.manual_seed(0)
x = torch.randn(64, 6)
y = (x @ torch.randn(6, 3)).argmax(1)
data = TensorDataset(x, y)
model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
opt = torch.optim.SGD(model.parameters(), lr=0.1)
def update(xb, yb):
    loss = F.cross_entropy(model(xb), yb)
    opt.zero_grad(); loss.backward(); opt.step()
    return loss
def evaluate(part):
    model.eval()
    with torch.no_grad():
        for xb, yb in DataLoader(part, batch_size=8):
            model(xb)
    model.train()
class Stream(IterableDataset):
    copies, split, shuffle = 1, False, False
    def __iter__(self):
        info, rows = get_worker_info(), list(range(64)) * self.copies
        if self.split and info is not None:
            rows = rows[:64][info.id :: info.num_workers] * self.copies
        if self.shuffle:
            random.Random(info.id if info else 0).shuffle(rows)
        return iter([(x[i], y[i]) for i in rows])
class Noisy(Dataset):
    def __init__(self, rng=None): self.rng = rng
    def __len__(self): return 32
    def noise(self): return torch.from_numpy(self.rng.normal(size=6)).float()
    def __getitem__(self, i): return x[i] + 0.1 * self.noise(), y[i]
"""

BUGS = [
    (
        "graph-retained",
        """
        for _ in range(3):
            mean = torch.zeros(())
            for b in DataLoader(data, 10, shuffle=True):
                mean += update(*b) / 7
            print(mean.item())
        """,
    ),
    (
        "graph-retained",
        """
        def epoch():
            losses = [update(*b) for b in DataLoader(data, 9, shuffle=True)]
            return torch.stack(losses).mean().item()
        curve = [epoch() for _ in range(4)]
        """,
    ),
    (
        "graph-retained",
        """
        history = []
        for _ in range(4):
            for b in DataLoader(data, 8, shuffle=True):
                history.append(update(*b))
        """,
    ),
    (
        "graph-retained",
        """
        total = torch.zeros(())
        for _ in range(4):
            for b in DataLoader(data, 8, shuffle=True):
                total = total + update(*b)
        """,
    ),
    (
        "data-repeated-batch",
        """
        xb, yb = next(iter(DataLoader(data, 8, shuffle=True)))
        for _ in range(30):
            update(xb, yb)
        """,
    ),
    (
        "data-repeated-batch",
        """
        loader = DataLoader(data, 8)
        class Batches:
            def take(self): return next(iter(loader))
        source = Batches()
        for step in range(30):
            update(*source.take())
        """,
    ),
    (
        "data-worker-duplicates",
        """
        for b in DataLoader(Stream(), batch_size=8, num_workers=2):
            update(*b)
        """,
    ),
    (
        "data-worker-duplicates",
        """
        stream = Stream()
        stream.shuffle = True
        loader = DataLoader(stream, batch_size=4, num_workers=2)
        for epoch in range(2):
            for xb, yb in loader:
                update(xb, yb)
        """,
    ),
    (
        "data-no-shuffle",
        """
        loader = DataLoader(data, batch_size=8)
        for epoch in range(3):
            for b in loader:
                update(*b)
        """,
    ),
    (
        "data-no-shuffle",
        """
        order = y.argsort()
        for epoch in range(3):
            for at in order.split(8):
                update(x[at], y[at])
        """,
    ),
    (
        "data-worker-seed",
        """
        loader = DataLoader(Noisy(np.random.default_rng(0)), 4, shuffle=True, num_workers=2)
        for b in loader:
            update(*b)
        """,
    ),
    (
        "data-worker-seed",
        """
        def init(worker_id):
            random.seed(7)
        class Jitter(Noisy):
            def noise(self): return torch.tensor([random.random() for _ in range(6)])
        for b in DataLoader(Jitter(), 4, shuffle=True, num_workers=2, worker_init_fn=init):
            update(*b)
        """,
    ),
    (
        "data-set-epoch",
        """
        sampler = DistributedSampler(data, num_replicas=2, rank=0)
        loader = DataLoader(data, batch_size=8, sampler=sampler)
        for epoch in range(3):
            for b in loader:
                update(*b)
        """,
    ),
    (
        "data-set-epoch",
        """
        from torch.utils.data import BatchSampler
        sampler = DistributedSampler(data, num_replicas=2, rank=1, seed=4)
        loader = DataLoader(data, batch_sampler=BatchSampler(sampler, 8, False))
        epoch, batches = 0, iter(loader)
        while epoch < 3:
            try:
                update(*next(batches))
            except StopIteration:
                epoch, batches = epoch + 1, iter(loader)
        """,
    ),
    (
        "rng-reset-in-loop",
        """
        for epoch in range(4):
            torch.manual_seed(0)
            for b in DataLoader(data, 8, shuffle=True):
                update(*b)
        """,
    ),
    (
        "rng-reset-in-loop",
        """
        generator = torch.Generator()
        loader = DataLoader(data, 8, shuffle=True, generator=generator)
        def epoch():
            generator.manual_seed(5)
            for b in loader:
                update(*b)
        for _ in range(4):
            epoch()
        """,
    ),
    (
        "data-nan",
        """
        x[3, 2] = float("nan")
        for b in DataLoader(data, 8, shuffle=True):
            update(*b)
        """,
    ),
    (
        "data-nan",
        """
        scale = x.std(0)
        scale[1] = 0.0
        class Scaled(Dataset):
            def __len__(self): return 64
            def __getitem__(self, i): return x[i] / scale, y[i]
        for xb, yb in DataLoader(Scaled(), 8, shuffle=True):
            loss = F.cross_entropy(model(xb), yb)
            opt.zero_grad(); loss.backward()
            if all(p.grad.isfinite().all() for p in model.parameters()):
                opt.step()
        """,
    ),
    (
        "val-overlaps-train",
        """
        train, _ = random_split(data, [40, 24])
        _, val = random_split(data, [40, 24])
        for epoch in range(3):
            for b in DataLoader(train, 8, shuffle=True):
                update(*b)
            evaluate(val)
        """,
    ),
    (
        "val-overlaps-train",
        """
        for epoch in range(3):
            for at in torch.randperm(48).split(8):
                update(x[at], y[at])
            model.eval()
            with torch.inference_mode():
                (model(x[30:]).argmax(1) == y[30:]).float().mean()
            model.train()
        """,
    ),
    (
        "val-overlaps-train",
        """
        for step in range(24):
            at = torch.randint(0, 40, (24,))
            update(x[at], y[at])
        model.eval()
        with torch.no_grad(): print(F.cross_entropy(model(x[24:]), y[24:]).item())
        """,
    ),
]

CLEAN = [
    (
        "graph-retained",
        """
        from collections import deque
        recent = deque(maxlen=6)
        for _ in range(4):
            for b in DataLoader(data, 8, shuffle=True):
                recent.append(update(*b))
        """,
    ),
    (
        "graph-retained",
        """
        history, total = [], torch.zeros(())
        for _ in range(4):
            for b in DataLoader(data, 8, shuffle=True):
                loss = update(*b)
                history.append(loss.detach()); total += loss.detach()
        """,
    ),
    (
        "graph-retained",
        """
        from collections import deque
        recent = deque(maxlen=5)
        for _ in range(4):
            for b in DataLoader(data, 8, shuffle=True):
                recent.append(update(*b))
        """,
    ),
    (
        "data-repeated-batch",
        """
        loader = DataLoader(data, batch_size=64)
        for epoch in range(30):
            for b in loader:
                update(*b)
        """,
    ),
    (
        "data-repeated-batch",
        """
        for b in DataLoader(data, 8, shuffle=True):
            for _ in range(4):
                update(*b)
        """,
    ),
    (
        "data-worker-duplicates",
        """
        stream = Stream()
        stream.split = True
        for b in DataLoader(stream, batch_size=4, num_workers=2):
            update(*b)
        """,
    ),
    (
        "data-worker-duplicates",
        """
        stream = Stream()
        stream.split, stream.copies, stream.shuffle = True, 2, True
        for b in DataLoader(stream, batch_size=4, num_workers=2):
            update(*b)
        """,
    ),
    (
        "data-no-shuffle",
        """
        train, val = random_split(data, [40, 24])
        loader = DataLoader(train, 8, shuffle=True)
        for epoch in range(3):
            for b in loader:
                update(*b)
            evaluate(val)
        """,
    ),
    (
        "data-no-shuffle",
        """
        for b in DataLoader(data, batch_size=8):
            update(*b)
        """,
    ),
    (
        "data-worker-seed",
        """
        def init(worker_id):
            get_worker_info().dataset.rng = np.random.default_rng(torch.initial_seed() % 2**63)
        loader = DataLoader(Noisy(), 4, shuffle=True, num_workers=2, worker_init_fn=init)
        for b in loader:
            update(*b)
        """,
    ),
    (
        "data-worker-seed",
        """
        class Quiet(Noisy):
            def noise(self): return 0.0
        loader = DataLoader(Quiet(np.random.default_rng(0)), 4, shuffle=True, num_workers=2)
        for b in loader:
            update(*b)
        """,
    ),
    (
        "data-set-epoch",
        """
        sampler = DistributedSampler(data, num_replicas=2, rank=0)
        loader = DataLoader(data, batch_size=8, sampler=sampler)
        for epoch in range(3):
            sampler.set_epoch(epoch)
            for b in loader:
                update(*b)
        """,
    ),
    (
        "data-set-epoch",
        """
        train, val = random_split(data, [40, 24])
        check = DataLoader(val, 8, sampler=DistributedSampler(val, num_replicas=2, rank=0))
        for epoch in range(3):
            for b in DataLoader(train, 8, shuffle=True):
                update(*b)
            model.eval()
            with torch.no_grad():
                for xb, yb in check:
                    model(xb)
            model.train()
        """,
    ),
    (
        "rng-reset-in-loop",
        """
        for epoch in range(4):
            torch.manual_seed(100 + epoch)
            for b in DataLoader(data, 8, shuffle=True):
                update(*b)
        """,
    ),
    (
        "rng-reset-in-loop",
        """
        train, val = random_split(data, [40, 24])
        for epoch in range(4):
            for b in DataLoader(train, 8, shuffle=True):
                update(*b)
            with torch.random.fork_rng():
                torch.manual_seed(0)
                evaluate(val)
        """,
    ),
    (
        "data-nan",
        """
        x[3, 2] = float("nan")
        class Filled(nn.Module):
            def forward(self, xb): return torch.nan_to_num(xb)
        model = nn.Sequential(Filled(), nn.Linear(6, 3))
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        for b in DataLoader(data, 8, shuffle=True):
            update(*b)
        """,
    ),
    (
        "data-nan",
        """
        x[3, 2] = float("inf")
        kept = [i for i in range(64) if x[i].isfinite().all()]
        for b in DataLoader(Subset(data, kept), 8, shuffle=True):
            update(*b)
        """,
    ),
    (
        "val-overlaps-train",
        """
        train, val = random_split(data, [40, 24])
        for epoch in range(3):
            for b in DataLoader(train, 8, shuffle=True):
                update(*b)
            evaluate(val)
        """,
    ),
    (
        "val-overlaps-train",
        """
        def samples(count): return (torch.rand(count, 6) > 0.5).float()
        for step in range(24):
            xb = samples(24); update(xb, xb.sum(1).long() % 3)
        model.eval()
        with torch.no_grad(): model(samples(32)).argmax(1)
        """,
    ),
    (
        "val-overlaps-train",
        """
        train, val = random_split(data, [40, 24])
        for epoch in range(3):
            for b in DataLoader(train, 8, shuffle=True):
                update(*b)
            evaluate(train)
        """,
    ),
]


@pytest.mark.parametrize(("slug", "source"), BUGS)
def test_bug_is_found(tmp_path: Path, slug: str, source: str) -> None:
    check_bug(tmp_path, slug, source, PREAMBLE)


@pytest.mark.parametrize(("slug", "source"), CLEAN)
def test_near_miss_is_clean(tmp_path: Path, slug: str, source: str) -> None:
    check_clean(tmp_path, slug, source, PREAMBLE)


@pytest.mark.parametrize(
    ("every", "updates", "found"),
    [(1, 40, True), (1, 21, True), (10, 40, False), (1, 10, False)],
)
def test_waits_for_a_device_are_counted_by_update(every: int, updates: int, found: bool) -> None:
    # No device is needed to count: on a CPU the probe sends none of these events.
    trace = Trace()
    rule = SyncEveryStep(trace)
    trace.listen(rule)
    place = Site("script.py", 12, "train")
    for update in range(updates):
        if update % every == 0:
            for _ in range(2):
                trace.emit(ev.Synchronised(seq=trace.tick(), site=place, how="item"))
        trace.updates += 1
    findings = list(rule.findings())
    assert bool(findings) is found
    assert all((f.slug, f.line) == ("sync-every-step", 12) for f in findings)
