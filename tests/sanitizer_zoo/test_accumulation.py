"""Accumulation: bugs of two styles each, and near-misses."""

from __future__ import annotations

from pathlib import Path

import pytest

from sanitizer_zoo.zoo import check_bug, check_clean

LOADER = """
from torch.utils.data import DataLoader, TensorDataset
loader = DataLoader(TensorDataset(x[:60], y[:60]), batch_size=6, shuffle=True)
"""
TOKENS = """
vocab = 11
lm = nn.Sequential(nn.Embedding(vocab, 8), nn.Linear(8, vocab))
opt = torch.optim.SGD(lm.parameters(), lr=0.1)
def rows(n, short=False):
    ids = torch.randint(0, vocab, (n, 12))
    labels = (ids * 3) % vocab
    if short:
        labels[:, 4:] = -100
    return ids, labels
"""

BUGS = [
    (
        "accum-wiped",
        """
        for i, b in enumerate(batches(16)):
            opt.zero_grad(); (loss_of(*b) / 4).backward()
            if i % 4 == 3: opt.step()
        """,
    ),
    (
        "accum-wiped",
        """
        def micro(b):
            model.zero_grad(set_to_none=False)
            loss_of(*b).div(2).backward()
        for _ in range(6):
            for b in batches(2): micro(b)
            opt.step()
        """,
    ),
    (
        "accum-no-scale",
        """
        for i, b in enumerate(batches(16)):
            loss_of(*b).backward()
            if i % 4 == 3: opt.step(); opt.zero_grad()
        """,
    ),
    (
        "accum-no-scale",
        """
        mse = nn.MSELoss()
        def window(bs):
            opt.zero_grad()
            for xb, yb in bs: mse(model(xb), F.one_hot(yb, 3).float()).backward()
            opt.step()
        for _ in range(6): window(batches(3))
        """,
    ),
    (
        "accum-tail-dropped",
        LOADER
        + """
for epoch in range(3):
    opt.zero_grad()
    for i, b in enumerate(loader):
        (loss_of(*b) / 4).backward()
        if i % 4 == 3: opt.step(); opt.zero_grad()
""",
    ),
    (
        "accum-tail-dropped",
        """
        pending = 0
        for b in batches(14):
            loss_of(*b).mul(1 / 3).backward(); pending += 1
            if pending == 3:
                opt.step(); pending = 0
                for p in model.parameters(): p.grad = None
        """,
    ),
    (
        "accum-tail-leak",
        LOADER
        + """
for epoch in range(4):
    for i, b in enumerate(loader):
        (loss_of(*b) / 4).backward()
        if (i + 1) % 4 == 0: opt.step(); opt.zero_grad()
opt.step()
""",
    ),
    (
        "accum-tail-leak",
        LOADER
        + """
class Loop:
    def epoch(self):
        for i, b in enumerate(loader, 1):
            torch.autograd.backward(loss_of(*b) * (1 / 3))
            if not i % 3:
                opt.step(); model.zero_grad()
loop = Loop()
for _ in range(4): loop.epoch()
opt.step()
""",
    ),
    (
        "accum-tail-misscaled",
        LOADER
        + """
for epoch in range(3):
    for i, b in enumerate(loader, 1):
        (loss_of(*b) / 4).backward()
        if i % 4 == 0 or i == len(loader): opt.step(); opt.zero_grad()
""",
    ),
    (
        "accum-tail-misscaled",
        """
        def flush(): opt.step(); opt.zero_grad()
        for i, b in enumerate(batches(14)):
            loss_of(*b).mul(0.25).backward()
            if i % 4 == 3: flush()
        flush()
        """,
    ),
    (
        "accum-token-mean",
        TOKENS
        + """
for step in range(6):
    opt.zero_grad()
    for short in (False, True):
        ids, labels = rows(4, short)
        (F.cross_entropy(lm(ids).flatten(0, 1), labels.flatten()) / 2).backward()
    opt.step()
""",
    ),
    (
        "accum-token-mean",
        TOKENS
        + """
criterion = nn.CrossEntropyLoss()
for step in range(12):
    ids, labels = rows(4, short=step % 3 == 0)
    criterion(lm(ids).transpose(1, 2), labels).mul(1 / 3).backward()
    if step % 3 == 2: opt.step(); opt.zero_grad()
""",
    ),
]

CLEAN = [
    (
        "accum-wiped",
        """
        for i, b in enumerate(batches(16)):
            (loss_of(*b) / 4).backward()
            if i % 4 == 3: opt.step(); opt.zero_grad()
        """,
    ),
    (
        "accum-wiped",
        """
        critic = nn.Linear(3, 1)
        opt_c = torch.optim.SGD(critic.parameters(), lr=0.1)
        for xb, yb in batches(8):
            out = model(xb)
            opt_c.zero_grad(); critic(out.detach()).mean().backward(); opt_c.step()
            opt.zero_grad(); critic(out).pow(2).mean().backward(); opt.step()
        """,
    ),
    (
        "accum-no-scale",
        """
        for i, b in enumerate(batches(16)):
            loss_of(*b).backward()
            if i % 4 == 3:
                for p in model.parameters(): p.grad /= 4
                opt.step(); opt.zero_grad()
        """,
    ),
    (
        "accum-no-scale",
        """
        for _ in range(6):
            opt.zero_grad()
            for xb, yb in batches(4):
                (F.cross_entropy(model(xb), yb, reduction="sum") / 32).backward()
            opt.step()
        """,
    ),
    (
        "accum-tail-dropped",
        LOADER
        + """
for epoch in range(3):
    opt.zero_grad()
    for i, b in enumerate(loader):
        (loss_of(*b) / 5).backward()
        if i % 5 == 4: opt.step(); opt.zero_grad()
""",
    ),
    (
        "accum-tail-dropped",
        """
        for xb, yb in batches(9):
            out = model(xb)
            opt.zero_grad()
            F.cross_entropy(out, yb).backward(retain_graph=True)
            (0.1 * out.pow(2).mean()).backward()
            opt.step()
        loss_of(*next(batches(1))).backward()
        """,
    ),
    (
        "accum-tail-leak",
        LOADER
        + """
seen = 0
for epoch in range(4):
    for b in loader:
        (loss_of(*b) / 4).backward(); seen += 1
        if seen % 4 == 0: opt.step(); opt.zero_grad()
""",
    ),
    (
        "accum-tail-leak",
        """
        for i, b in enumerate(batches(20)):
            (loss_of(*b) / 4).backward()
            if i % 4 == 3: opt.step(); opt.zero_grad()
        """,
    ),
    (
        "accum-tail-misscaled",
        LOADER
        + """
for epoch in range(3):
    for i, b in enumerate(loader, 1):
        size = 4 if i <= 8 else 2
        (loss_of(*b) / size).backward()
        if i % 4 == 0 or i == len(loader): opt.step(); opt.zero_grad()
""",
    ),
    (
        "accum-tail-misscaled",
        LOADER
        + """
for epoch in range(3):
    for i, b in enumerate(loader, 1):
        loss_of(*b).backward()
        if i % 4 == 0 or i == len(loader):
            torch._foreach_div_([p.grad for p in model.parameters()], 4 if i <= 8 else 2)
            opt.step(); opt.zero_grad()
""",
    ),
    (
        "accum-token-mean",
        TOKENS
        + """
for step in range(6):
    window = [rows(4, short) for short in (False, True)]
    tokens = sum((labels != -100).sum() for _, labels in window)
    opt.zero_grad()
    for ids, labels in window:
        out = lm(ids).flatten(0, 1)
        (F.cross_entropy(out, labels.flatten(), reduction="sum") / tokens).backward()
    opt.step()
""",
    ),
    (
        "accum-token-mean",
        TOKENS
        + """
for step in range(6):
    opt.zero_grad()
    for _ in range(2):
        ids, labels = rows(4)
        (F.cross_entropy(lm(ids).flatten(0, 1), labels.flatten()) / 2).backward()
    opt.step()
""",
    ),
    (
        "accum-token-mean",
        """
rare = torch.tensor([0.6, 3.1, 1.7])
classifier = nn.Linear(4, 3)
opt = torch.optim.SGD(classifier.parameters(), lr=0.1)
for step in range(6):
    opt.zero_grad()
    for _ in range(2):
        inputs, labels = torch.randn(12, 4), torch.randint(0, 3, (12,))
        (F.cross_entropy(classifier(inputs), labels, weight=rare) / 2).backward()
    opt.step()
""",
    ),
]


@pytest.mark.parametrize(("slug", "source"), BUGS)
def test_bug_is_found(tmp_path: Path, slug: str, source: str) -> None:
    check_bug(tmp_path, slug, source)


@pytest.mark.parametrize(("slug", "source"), CLEAN)
def test_near_miss_is_quiet(tmp_path: Path, slug: str, source: str) -> None:
    check_clean(tmp_path, slug, source)
