"""Bugs that lie close to what is meant, and what is meant beside each of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from sanitizer_zoo.zoo import CLASSIFIER, check_bug, check_clean

MORE = """
import copy, io
from torch.utils.data import DataLoader, TensorDataset
def update(b, opt=opt):
    opt.zero_grad(); loss_of(*b).backward(); opt.step()
class Sides(nn.Module):
    def __init__(self, drop=0.2):
        super().__init__()
        self.one, self.norm, self.two = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)
        self.drop = drop
    def forward(self, v):
        v = F.dropout(self.norm(self.one(v)), self.drop, training=self.training)
        return self.two(v)
sides = Sides()
def train(net, opt, n=6, loss=None):
    net.train()
    for xb, yb in batches(n):
        opt.zero_grad()
        (loss or F.cross_entropy)(net(xb), yb).backward()
        opt.step()
"""

BUGS = [
    (
        "missing-zero-grad",
        """
        for b in batches(8):
            opt.zero_grad(); loss_of(*b).backward(); opt.step(); opt.step()
        """,
    ),
    (
        "missing-zero-grad",
        """
        for b in batches(8):
            loss_of(*b).backward()
            for p in model.parameters(): p.grad.div_(4)
            opt.step()
        """,
    ),
    (
        "clip-after-step",
        """
        for b in batches(8):
            opt.zero_grad(); loss_of(*b).backward()
            for p in model.parameters(): p.grad *= 0.5
            opt.step()
            nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        """,
    ),
    ("param-no-grad", "for b in batches(8): opt.zero_grad(); loss_of(*b); opt.step()"),
    ("optimizer-never-stepped", "for b in batches(12): opt.zero_grad(); loss_of(*b).backward()"),
    (
        "sched-wrong-unit",
        """
        plan = torch.optim.lr_scheduler.ExponentialLR(opt, 0.9)
        for epoch in range(4):
            for b in batches(4): update(b)
            plan.step()
            plan.step()
        """,
    ),
    (
        "sched-wrong-unit",
        """
        plan = torch.optim.lr_scheduler.LambdaLR(opt, lambda n: 1 - n / 6)
        for b in batches(12): update(b); plan.step()
        """,
    ),
    (
        "sched-wrong-unit",
        """
        plan = torch.optim.lr_scheduler.CosineAnnealingLR(opt, 16)
        for epoch in range(4):
            for b in batches(4): update(b)
            plan.step()
        """,
    ),
    (
        "sched-wrong-unit",
        """
        plan = torch.optim.lr_scheduler.LambdaLR(opt, lambda n: min(1.0, (n + 1) / 8))
        for epoch in range(3):
            for b in batches(6): update(b)
            plan.step()
        """,
    ),
    (
        "sched-wrong-unit",
        """
        plan = torch.optim.lr_scheduler.StepLR(opt, 1, 0.1)
        for b in batches(12): update(b); plan.step()
        """,
    ),
    (
        "lr-never-changes",
        """
        plan = torch.optim.lr_scheduler.ReduceLROnPlateau(opt)
        loader = DataLoader(TensorDataset(x, y), 16, shuffle=True)
        for epoch in range(3):
            for b in loader: update(b)
        """,
    ),
    (
        "teacher-in-train-mode",
        """
        train(sides, torch.optim.Adam(sides.parameters()))
        for xb, yb in batches(8):
            with torch.no_grad(): wanted = sides(xb).softmax(1)
            opt.zero_grad(); F.cross_entropy(model(xb), wanted).backward(); opt.step()
        """,
    ),
    (
        "frozen-bn-drift",
        """
        train(sides, torch.optim.Adam(sides.parameters()))
        for part in (sides.one, sides.norm): part.requires_grad_(False)
        train(sides, torch.optim.SGD(sides.two.parameters(), lr=0.1))
        """,
    ),
    (
        "train-in-eval-mode",
        """
        class Plain(nn.Module):
            def __init__(self):
                super().__init__()
                self.out = nn.Linear(6, 3)
            def forward(self, v): return self.out(F.dropout(v, 0.2, training=self.training))
        plain = Plain()
        fast = torch.optim.SGD(plain.parameters(), lr=0.1)
        train(plain, fast)
        plain.eval()
        for xb, yb in batches(6):
            fast.zero_grad(); F.cross_entropy(plain(xb), yb).backward(); fast.step()
        """,
    ),
    (
        "eval-in-train-mode",
        """
        fast = torch.optim.SGD(sides.parameters(), lr=0.1)
        sides.drop = 0.0
        for epoch in range(3):
            for xb, yb in DataLoader(TensorDataset(x[:48], y[:48]), 8, shuffle=True):
                fast.zero_grad(); F.cross_entropy(sides(xb), yb).backward(); fast.step()
            with torch.no_grad(): right = (sides(x[48:]).argmax(1) == y[48:]).sum()
        """,
    ),
    (
        "val-overlaps-train",
        """
        val_x, val_y = x[40:], y[40:]
        for epoch in range(3):
            for part in torch.randperm(64).split(8): update((x[part], y[part]))
            model.eval()
            with torch.no_grad(): F.cross_entropy(model(val_x), val_y)
            model.train()
        """,
    ),
    (
        "clip-wrong-params",
        """
        other = nn.Linear(3, 3)
        slow = torch.optim.SGD(other.parameters(), lr=0.1)
        for xb, yb in batches(8):
            slow.zero_grad(); F.cross_entropy(other(model(xb).detach()), yb).backward(); slow.step()
            opt.zero_grad(); F.cross_entropy(other(model(xb)), yb).backward()
            nn.utils.clip_grad_norm_(other.parameters(), 0.1)
            opt.step()
        """,
    ),
    (
        "graph-retained",
        """
        kept = []
        for b in batches(20):
            opt.zero_grad(); loss = loss_of(*b); (loss / 4).backward(); opt.step()
            kept.append(loss)
        """,
    ),
    (
        "graph-retained",
        """
        average = copy.deepcopy(model).requires_grad_(False)
        for b in batches(24):
            update(b)
            for kept, new in zip(average.parameters(), model.parameters()): kept.lerp_(new, 0.1)
        average(x)
        """,
    ),
    (
        "param-not-in-optimizer",
        "train(sides, torch.optim.SGD(model.parameters(), lr=0.1), 8)",
    ),
    (
        "param-not-in-optimizer",
        """
        update((x, y))
        sides(x)
        train(sides, torch.optim.SGD([sides.one.weight, sides.two.weight], lr=0.1), 12)
        """,
    ),
    (
        "unregistered-submodule",
        """
        class Keyed(nn.Module):
            def __init__(self):
                super().__init__()
                self.body = nn.Linear(6, 6)
                self.heads = {"a": nn.Linear(6, 3), "b": nn.Linear(6, 3)}
            def forward(self, v): return self.heads["a"](self.body(v)) + self.heads["b"](v)
        keyed = Keyed()
        heads = [p for head in keyed.heads.values() for p in head.parameters()]
        train(keyed, torch.optim.SGD([*keyed.parameters(), *heads], lr=0.1))
        """,
    ),
    (
        "loss-broadcast",
        """
        import warnings
        warnings.simplefilter("ignore")  # torch warns, and who reads that?
        value = nn.Linear(6, 1)
        def loss(out, yb): return F.smooth_l1_loss(out[:, 0], yb.float() + out.detach())
        train(value, torch.optim.SGD(value.parameters(), lr=0.1), loss=loss)
        """,
    ),
    (
        "labels-double-shifted",
        """
        words = torch.randint(1, 40, (24, 12))
        class Reader(nn.Module):
            def __init__(self):
                super().__init__()
                self.words, self.gru = nn.Embedding(40, 8), nn.GRU(8, 8, batch_first=True)
                self.out = nn.Linear(8, 40)
            def forward(self, w): return self.out(self.gru(self.words(w))[0])
        reader = Reader()
        fast = torch.optim.Adam(reader.parameters())
        def ce(out, wanted): return F.cross_entropy(out.flatten(0, 1), wanted.flatten())
        for part in words.split(8):
            fast.zero_grad(); ce(reader(part[:, :-1]), part[:, 1:]).backward(); fast.step()
        for part in words.split(8):
            with torch.no_grad(): F.nll_loss(
                reader(part[:, :-2]).log_softmax(-1).flatten(0, 1), part[:, 2:].flatten())
        """,
    ),
    (
        "resume-missing-state",
        """
        file = io.BytesIO()
        for b in batches(4): update(b)
        state = {"model": model.state_dict(), "step": 4, "rng": torch.get_rng_state()}
        torch.save(state, file)
        saved = torch.load(io.BytesIO(file.getvalue()))
        model.load_state_dict(saved["model"])
        for b in batches(8 - saved["step"]): update(b)
        """,
    ),
]

CLEAN = [
    (
        "missing-zero-grad",
        """
        second = torch.optim.SGD(model.parameters(), lr=0.01)
        for b in batches(8):
            opt.zero_grad(); loss_of(*b).backward(); opt.step(); second.step()
        """,
    ),
    (
        "missing-zero-grad",
        """
        for b in batches(8):
            loss_of(*b).backward(); opt.step()
            for p in model.parameters(): p.grad.mul_(0.9)  # momentum
        """,
    ),
    (
        "param-no-grad",
        """
        rates = []
        for _ in range(8):
            opt.step()
            rates.append(opt.param_groups[0]["lr"])
        for b in batches(4): update(b, torch.optim.SGD(model.parameters(), lr=0.1))
        """,
    ),
    (
        "optimizer-never-stepped",
        """
        for b in batches(12):
            model.zero_grad(); loss_of(*b).backward()
            norms = [p.grad.norm() for p in model.parameters()]
        """,
    ),
    (
        "sched-wrong-unit",
        """
        plan = torch.optim.lr_scheduler.ExponentialLR(opt, 1.3)  # looks for a rate
        for b in batches(16): update(b); plan.step()
        """,
    ),
    (
        "sched-wrong-unit",
        """
        one = torch.optim.lr_scheduler.ExponentialLR(opt, 0.95)
        two = torch.optim.lr_scheduler.MultiStepLR(opt, [2, 3])
        for epoch in range(4):
            for b in batches(4): update(b)
            one.step(); two.step()
        """,
    ),
    (
        "lr-never-changes",
        """
        plan = torch.optim.lr_scheduler.ReduceLROnPlateau(opt)
        for b in DataLoader(TensorDataset(x, y), 4, shuffle=True): update(b)
        """,
    ),
    (
        "teacher-in-train-mode",
        """
        train(sides, torch.optim.Adam(sides.parameters()))
        sides.eval()
        for xb, yb in batches(8):
            with torch.no_grad(): wanted = sides(xb).softmax(1)
            opt.zero_grad(); F.cross_entropy(model(xb), wanted).backward(); opt.step()
        """,
    ),
    (
        "frozen-bn-drift",
        """
        fast = torch.optim.Adam(sides.parameters())
        for _ in range(6):  # two nets take turns
            sides.requires_grad_(False)
            for xb, yb in batches(1):
                opt.zero_grad(); (loss_of(xb, yb) + 0 * sides(xb).mean()).backward(); opt.step()
            sides.requires_grad_(True)
            train(sides, fast, 1)
        """,
    ),
    (
        "val-overlaps-train",
        """
        train_x, train_y = x[:48], y[:48]
        for epoch in range(3):
            for part in torch.randperm(48).split(8): update((x[part], y[part]))
            model.eval()
            with torch.no_grad(): F.cross_entropy(model(train_x[:24]), train_y[:24])
            with torch.no_grad(): F.cross_entropy(model(x[48:]), y[48:])
            model.train()
        """,
    ),
    (
        "val-overlaps-train",
        """
        teacher = sides
        train(teacher, torch.optim.Adam(teacher.parameters()))
        teacher.eval()
        for part in torch.randperm(64)[:48].split(8):
            with torch.no_grad(): wanted = teacher(x[part]).softmax(1)
            opt.zero_grad(); F.cross_entropy(model(x[part]), wanted).backward(); opt.step()
        """,
    ),
    (
        "clip-wrong-params",
        """
        other = nn.Linear(3, 3)
        slow = torch.optim.SGD(other.parameters(), lr=0.1)
        for xb, yb in batches(8):
            opt.zero_grad(); slow.zero_grad()
            F.cross_entropy(other(model(xb)), yb).backward()
            nn.utils.clip_grad_norm_(other.parameters(), 0.1)
            opt.step()
            slow.step()
        """,
    ),
    (
        "graph-retained",
        """
        average = copy.deepcopy(model).requires_grad_(False)
        for b in batches(24):
            update(b)
            with torch.no_grad():
                for kept, new in zip(average.parameters(), model.parameters()): kept.lerp_(new, 0.1)
        average(x)
        """,
    ),
    (
        "param-not-in-optimizer",
        """
        train(sides, torch.optim.SGD(sides.parameters(), lr=0.1), 8)
        for b in batches(2): loss_of(*b).backward()  # how much its weights matter
        train(sides, torch.optim.SGD(sides.parameters(), lr=0.1), 8)
        """,
    ),
    (
        "resume-missing-state",
        """
        own = torch.Generator().manual_seed(1)
        file = io.BytesIO()
        for b in batches(4): update(b)
        state = {"model": model.state_dict(), "step": 4, "stream": own.get_state()}
        torch.save(state, file)
        saved = torch.load(io.BytesIO(file.getvalue()))
        model.load_state_dict(saved["model"])
        own.set_state(saved["stream"])
        for b in batches(8 - saved["step"]): update(b)
        """,
    ),
]


@pytest.mark.parametrize(("slug", "source"), BUGS)
def test_bug_is_found(tmp_path: Path, slug: str, source: str) -> None:
    check_bug(tmp_path, slug, source, CLASSIFIER + MORE)


@pytest.mark.parametrize(("slug", "source"), CLEAN)
def test_near_miss_is_quiet(tmp_path: Path, slug: str, source: str) -> None:
    check_clean(tmp_path, slug, source, CLASSIFIER + MORE)
