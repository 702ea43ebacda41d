"""Resume and precision: bugs of two styles each, and near-misses."""

from __future__ import annotations

from pathlib import Path

import pytest

from sanitizer_zoo.zoo import check_bug, check_clean, findings_of
from surefoot.core.finding import Severity

RESUME = """
import io, os, tempfile
import torch
from torch import nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)
x = torch.randn(64, 6)
y = (x @ torch.randn(6, 3)).argmax(1)
path = os.path.join(tempfile.mkdtemp(), "last.pt")
def net():
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
def updates(model, opt, n, scaler=None):
    for _ in range(n):
        at = torch.randint(0, 64, (8,))
        opt.zero_grad()
        loss = F.cross_entropy(model(x[at]), y[at])
        if scaler is None:
            loss.backward(); opt.step()
        else:
            scaler.scale(loss).backward(); scaler.step(opt); scaler.update()
"""

BUGS = [
    (
        "resume-missing-state",
        """
        def run(first, last):
            model = net()
            opt = torch.optim.AdamW(model.parameters(), lr=0.01)
            if first:
                saved = torch.load(path)
                model.load_state_dict(saved["model"])
                first = saved["epoch"] + 1
            for epoch in range(first, last):
                updates(model, opt, 4)
                torch.save({"model": model.state_dict(), "epoch": epoch}, path)
        run(0, 2)
        run(2, 4)
        """,
    ),
    (
        "resume-missing-state",
        """
        class Session:
            def __init__(self):
                self.net = net()
                self.opt = torch.optim.SGD(self.net.parameters(), lr=0.1, momentum=0.9)
                self.plan = torch.optim.lr_scheduler.CosineAnnealingLR(self.opt, 20)
                self.step = 0
            def go(self, until):
                while self.step < until:
                    updates(self.net, self.opt, 1)
                    self.plan.step()
                    self.step += 1
            def pack(self, file):
                weights, opt = self.net.state_dict(), self.opt.state_dict()
                torch.save(dict(weights=weights, opt=opt, global_step=self.step), file)
            def unpack(self, file):
                found = torch.load(file)
                self.net.load_state_dict(found["weights"])
                self.opt.load_state_dict(found["opt"])
                self.step = found.get("global_step")
        one, two, file = Session(), Session(), io.BytesIO()
        one.go(10); one.pack(file); file.seek(0)
        two.unpack(file); two.go(20)
        """,
    ),
    (
        "resume-missing-state",
        """
        data = TensorDataset(x, y)
        def run(epochs):
            shuffler = torch.Generator().manual_seed(1)
            model = net()
            opt = torch.optim.SGD(model.parameters(), lr=0.1)
            first = 0
            if os.path.exists(path):
                saved = torch.load(path)
                model.load_state_dict(saved["model"])
                first = saved["epoch"]
            for epoch in range(first, epochs):
                for xb, yb in DataLoader(data, 8, shuffle=True, generator=shuffler):
                    opt.zero_grad(); F.cross_entropy(model(xb), yb).backward(); opt.step()
                torch.save({"model": model.state_dict(), "epoch": epoch + 1}, path)
        run(2)
        run(4)
        """,
    ),
    (
        "scaler-bypassed",
        """
        model, scaler = net(), torch.amp.GradScaler("cpu", init_scale=1024.0)
        opt = torch.optim.SGD(model.parameters(), lr=1e-5)
        for _ in range(8):
            opt.zero_grad()
            loss = F.cross_entropy(model(x), y)
            scaler.scale(loss).backward()
            opt.step()
        """,
    ),
    (
        "scaler-bypassed",
        """
        class Trainer:
            def __init__(self):
                self.model = net()
                self.opt = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
                self.scaler = torch.amp.GradScaler("cpu")
            def accumulate(self, xb, yb):
                self.scaler.scale(F.cross_entropy(self.model(xb), yb) / 2).backward()
            def apply(self):
                self.opt.step()
                self.opt.zero_grad(set_to_none=False)
        trainer = Trainer()
        for at in range(0, 64, 8):
            trainer.accumulate(x[at : at + 4], y[at : at + 4])
            trainer.accumulate(x[at + 4 : at + 8], y[at + 4 : at + 8])
            trainer.apply()
        """,
    ),
    (
        "fp16-no-scaler",
        """
        model = net()
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(8):
            opt.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                loss = F.mse_loss(model(x), model(x).detach() + 1e-7) * 1e-3
            loss.backward()
            opt.step()
        """,
    ),
    (
        "fp16-no-scaler",
        """
        class Half(nn.Module):
            def __init__(self):
                super().__init__()
                self.inner = net()
            def forward(self, v):
                with torch.autocast("cpu", dtype=torch.half):
                    return self.inner(v)
        model = Half()
        opt = torch.optim.Adam(model.parameters())
        def closure_of(v, t):
            loss = (model(v).float().log_softmax(1) * t).mean()
            (loss * 1e-6).backward()
        for _ in range(6):
            opt.zero_grad()
            closure_of(x, F.one_hot(y, 3).float())
            opt.step()
        """,
    ),
]

CLEAN = [
    (
        "resume-missing-state",
        """
        def run(first, last):
            model = net()
            opt = torch.optim.AdamW(model.parameters(), lr=0.01)
            plan = torch.optim.lr_scheduler.StepLR(opt, 1, 0.9)
            if first:
                saved = torch.load(path)
                for part, name in ((model, "model"), (opt, "opt"), (plan, "plan")):
                    part.load_state_dict(saved[name])
                first = saved["epoch"] + 1
            for epoch in range(first, last):
                updates(model, opt, 4)
                plan.step()
                state = {"model": model.state_dict(), "opt": opt.state_dict()}
                torch.save({**state, "plan": plan.state_dict(), "epoch": epoch}, path)
        run(0, 2)
        run(2, 4)
        """,
    ),
    (
        "resume-missing-state",
        """
        model = net()
        updates(model, torch.optim.Adam(model.parameters()), 4)
        torch.save(model.state_dict(), path)
        tuned = net()
        tuned.load_state_dict(torch.load(path))
        updates(tuned, torch.optim.Adam(tuned.parameters(), lr=1e-4), 4)
        """,
    ),
    (
        "resume-missing-state",
        """
        def run(first):
            model = net()
            opt = torch.optim.SGD(model.parameters(), lr=0.1)
            if first:
                saved = torch.load(path)
                model.load_state_dict(saved["model"])
                first = saved["step"]
            updates(model, opt, 4)
            torch.save({"model": model.state_dict(), "step": first + 4}, path)
        run(0)
        run(4)
        """,
    ),
    (
        "resume-missing-state",
        """
        def moments(opt, stored):
            for p, (mean, square) in zip(opt.param_groups[0]["params"], stored):
                opt.state[p] = {
                    "step": torch.tensor(4.0), "exp_avg": mean, "exp_avg_sq": square,
                }
        model = net()
        opt = torch.optim.Adam(model.parameters())
        updates(model, opt, 4)
        stored = [(s["exp_avg"], s["exp_avg_sq"]) for s in opt.state.values()]
        torch.save({"model": model.state_dict(), "moments": stored, "step": 4}, path)
        saved, again = torch.load(path), net()
        again.load_state_dict(saved["model"])
        opt = torch.optim.Adam(again.parameters())
        moments(opt, saved["moments"])
        updates(again, opt, 4 + saved["step"])
        """,
    ),
    (
        "scaler-bypassed",
        """
        model, scaler = net(), torch.amp.GradScaler("cpu", init_scale=1024.0)
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        updates(model, opt, 8, scaler)
        """,
    ),
    (
        "scaler-bypassed",
        """
        model, scaler = net(), torch.amp.GradScaler("cpu", enabled=False)
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(8):
            opt.zero_grad()
            scaler.scale(F.cross_entropy(model(x), y)).backward()
            opt.step()
        """,
    ),
    (
        "scaler-bypassed",
        """
        model, scaler = net(), torch.amp.GradScaler("cpu", init_scale=1024.0)
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(8):
            opt.zero_grad()
            scaler.scale(F.cross_entropy(model(x), y)).backward()
            for p in model.parameters():
                p.grad /= 1024.0
            opt.step()
        """,
    ),
    (
        "fp16-no-scaler",
        """
        model, scaler = net(), torch.amp.GradScaler("cpu", init_scale=1024.0)
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(8):
            opt.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                loss = F.cross_entropy(model(x), y)
            scaler.scale(loss).backward(); scaler.step(opt); scaler.update()
        """,
    ),
    (
        "fp16-no-scaler",
        """
        model = net()
        opt = torch.optim.Adam(model.parameters())
        for _ in range(8):
            opt.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = F.mse_loss(model(x), model(x).detach() + 1e-7) * 1e-3
            loss.backward()
            opt.step()
        """,
    ),
]


@pytest.mark.parametrize(("slug", "source"), BUGS)
def test_bug_is_found(tmp_path: Path, slug: str, source: str) -> None:
    check_bug(tmp_path, slug, source, RESUME)


@pytest.mark.parametrize(("slug", "source"), CLEAN)
def test_near_miss_is_quiet(tmp_path: Path, slug: str, source: str) -> None:
    check_clean(tmp_path, slug, source, RESUME)


COUNTED = """
model = net()
updates(model, torch.optim.Adam(model.parameters()), 4)
torch.save({"model": model.state_dict(), "epoch": 7}, path)
saved, tuned = torch.load(path), net()
tuned.load_state_dict(saved["model"])
COUNT
updates(tuned, torch.optim.Adam(tuned.parameters(), lr=1e-4), 4)
"""


@pytest.mark.parametrize(
    ("count", "severity"),
    [
        ("epoch = saved['epoch'] + 1", Severity.WARNING),
        ("first = saved.get('epoch', 0)", Severity.WARNING),
        ("pass", Severity.HINT),
        ("print('from epoch', saved['epoch'])", Severity.HINT),
        ("text = f\"of epoch {saved['epoch']}\"", Severity.HINT),
        ("name = 'epoch'", Severity.HINT),
    ],
)
def test_a_counter_that_nobody_goes_on_from_is_a_hint(
    tmp_path: Path, count: str, severity: Severity
) -> None:
    (finding,) = [
        f
        for f in findings_of(tmp_path, COUNTED.replace("COUNT", count), RESUME)
        if f.slug == "resume-missing-state"
    ]
    assert finding.severity is severity


SCALED = """
def run(step):
    model, scaler = net(), torch.amp.GradScaler("cpu", init_scale=64.0, enabled=ENABLED)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    if step:
        saved = torch.load(path)
        model.load_state_dict(saved["model"])
        step = saved["step"]
    updates(model, opt, 4, scaler)
    torch.save({"model": model.state_dict(), "step": step + 4}, path)
run(0)
run(4)
"""


@pytest.mark.parametrize("enabled", [True, False])
def test_a_scaler_that_was_not_restored_is_named(tmp_path: Path, enabled: bool) -> None:
    found = findings_of(tmp_path, SCALED.replace("ENABLED", str(enabled)), RESUME)
    assert [f.evidence.get("gradient scaler") for f in found] == ["GradScaler"] * enabled
