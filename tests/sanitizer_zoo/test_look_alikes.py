"""Correct programs that look like bugs, in the styles of other people's scripts."""

from __future__ import annotations

from pathlib import Path

import pytest

from sanitizer_zoo.zoo import CLASSIFIER, OTHER_HANDS, check_clean, findings_of
from surefoot.core.finding import Severity

SHARPNESS = """
class Sharpness(torch.optim.Optimizer):
    def __init__(self, params, base, **kw):
        super().__init__(params, kw)
        self.base = base(self.param_groups, **kw)
        self.param_groups = self.base.param_groups
    def step(self, closure):
        loss = torch.enable_grad()(closure)()
        with torch.no_grad():
            for g in self.param_groups:
                for p in g["params"]: p.add_(p.grad, alpha=0.01)
        self.zero_grad()
        torch.enable_grad()(closure)()
        with torch.no_grad():
            for g in self.param_groups:
                for p in g["params"]: p.sub_(p.grad, alpha=0.01)
        self.base.step(); self.zero_grad()
        return loss
m = net()
own = Sharpness(m.parameters(), torch.optim.SGD, lr=0.1)
sched = torch.optim.lr_scheduler.StepLR(own.base, 20)
for b in batches(24):
    def closure():
        loss = nn.functional.cross_entropy(m(b[0]), b[1]); loss.backward(); return loss
    own.step(closure); sched.step()
"""
"""An optimizer that steps within another one, which has a scheduler of its own."""

CLEAN = [
    ("optimizer-never-stepped", SHARPNESS),
    ("sched-before-optim", SHARPNESS),
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
    (
        "optimizer-stale-params",
        """
        for b in batches(9): update(b)
        model[2] = nn.Linear(8, 3)
        opt.add_param_group({"params": model[2].parameters()})
        for b in batches(12): update(b)
        """,
    ),
    (
        "optimizer-stale-params",
        """
        for b in batches(9): update(b)
        model[2] = nn.Linear(8, 3)
        for b in batches(12):
            update(b)
            with torch.no_grad():
                for p in model[2].parameters(): p -= 0.1 * p.grad; p.grad = None
        """,
    ),
    (
        "tied-weights-broken",
        """
        words = Words()
        words.out.weight = words.emb.weight
        words.emb.weight.data.copy_(torch.randn(12, 6))
        tell(words)
        words.emb, words.out = nn.Embedding(16, 6), nn.Linear(6, 16, bias=False)
        words.out.weight = words.emb.weight
        tell(words)
        """,
    ),
    (
        "tied-weights-broken",
        """
        words = Words()
        words.out.weight = words.emb.weight
        tell(words)
        tell(Words())  # how much does the tie bring?
        """,
    ),
    (
        "low-precision-update-lost",
        """
        half = net().bfloat16()
        own = Own(half.parameters(), {"lr": 1e-4, "keep": True})
        for xb, yb in batches(20): update((xb.bfloat16(), yb), own, half)
        """,
    ),
    (
        "low-precision-update-lost",
        """
        half = net().bfloat16()
        own = Own(half.parameters(), {"lr": 1e-4, "chance": True})
        for xb, yb in batches(130): update((xb.bfloat16(), yb), own, half)
        """,
    ),
    (
        "frozen-decayed",
        """
        nn.init.uniform_(model[0].bias, -6, 1)  # many units are dead
        for p in model.parameters(): p.register_hook(lambda g: g.clamp(-1, 1))
        fast = torch.optim.AdamW(model.parameters(), lr=1e-3)
        for b in batches(12): update(b, fast)
        """,
    ),
    (
        "frozen-decayed",
        """
        fast = torch.optim.SGD(model.parameters(), lr=0.1)
        for b in batches(12):
            opt.zero_grad(); loss_of(*b).backward()
            model[2].weight.grad[:2] = 0
            fast.step()
        """,
    ),
    (
        "data-repeated-batch",
        """
        batch_size = 16  # to evaluate
        for step in range(30): update(((x - x.mean(0)) / x.std(0), y))
        """,
    ),
    (
        "data-repeated-batch",
        """
        near = torch.eye(64)[torch.randint(0, 64, (16,))]
        batch_size = 16
        for step in range(30):
            at = torch.randint(0, 16, (batch_size,))
            opt.zero_grad(); F.cross_entropy(model(near @ x)[at], y[at]).backward(); opt.step()
        """,
    ),
    (
        "val-overlaps-train",
        """
        known, pool = list(range(16)), list(range(16, 64))
        for _ in range(3):  # the model asks for the labels that it is least sure of
            model.train()
            for part in torch.tensor(known).split(8): update((x[part], y[part]))
            model.eval()
            with torch.no_grad(): best = model(x[pool]).softmax(1).max(1).values
            asked = [pool[i] for i in best.argsort()[:10].tolist()]
            known, pool = known + asked, [i for i in pool if i not in asked]
        """,
    ),
    (
        "val-overlaps-train",
        """
        own = net(); fast = torch.optim.SGD(own.parameters(), lr=0.1)
        model.train(); own.train()
        for part in torch.arange(40).split(8): update((x[part], y[part]))
        model.eval()
        with torch.no_grad(): wanted = model(x).softmax(1)
        for part in torch.randperm(64).split(8): update((x[part], wanted[part]), fast, own)
        """,
    ),
    (
        "train-in-eval-mode",
        """
        own = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.3), nn.Linear(8, 3))
        fast = torch.optim.SGD(own.parameters(), lr=0.1)
        for xb, yb in batches(8):
            own.eval()
            near = xb.clone().requires_grad_(True)
            F.cross_entropy(own(near), yb).backward()
            own.train()
            update(((near + 0.1 * near.grad.sign()).detach(), yb), fast, own)
        """,
    ),
    (
        "lm-not-causal",
        """
        class Back(Words):
            def __init__(self):
                super().__init__()
                self.conv = nn.Conv1d(6, 6, 3)
                self.more = nn.Conv1d(6, 6, 3, padding=2)
            def forward(self, ids):
                seen = self.conv(F.pad(self.emb(ids).transpose(1, 2), (2, 0))).tanh()
                return self.out(self.more(seen)[:, :, :-2].transpose(1, 2))
        tell(Back())
        """,
    ),
    (
        "graph-retained",
        """
        kept = []
        for xb, yb in batches(24):
            out = model(xb); kept = [*kept[-4:], out]
            opt.zero_grad(); F.cross_entropy(out, yb).backward(); opt.step()
        """,
    ),
    (
        "sigmoid-before-bcelogits",
        """
        for xb, yb in batches(12):  # logits between -4 and 4
            bounded = 8 * torch.sigmoid(model(xb)) - 4
            loss = F.binary_cross_entropy_with_logits(bounded, F.one_hot(yb, 3).float())
            opt.zero_grad(); loss.backward(); opt.step()
        """,
    ),
]


@pytest.mark.parametrize(("slug", "source"), CLEAN)
def test_near_miss_is_quiet(tmp_path: Path, slug: str, source: str) -> None:
    check_clean(tmp_path, slug, source, CLASSIFIER + OTHER_HANDS)


def test_unequal_samples_that_count_as_one_are_a_hint(tmp_path: Path) -> None:
    source = """
    for _ in range(6):  # each micro-batch is one graph
        opt.zero_grad()
        for b in (*batches(1, 4), *batches(1, 9)): (loss_of(*b) / 2).backward()
        opt.step()
    """
    found = findings_of(tmp_path, source)
    assert [(f.slug, f.severity) for f in found] == [("accum-token-mean", Severity.HINT)]


def test_a_group_that_is_frozen_for_a_stage_is_a_hint(tmp_path: Path) -> None:
    source = """
    fast = torch.optim.SGD([
        {"params": model[0].parameters(), "lr": 0.0}, {"params": model[2].parameters(), "lr": 0.1},
    ])
    for i, (xb, yb) in enumerate(batches(16)):
        if i == 8: fast.param_groups[0]["lr"] = 0.01
        fast.zero_grad(); loss_of(xb, yb).backward(); fast.step()
    """
    found = findings_of(tmp_path, source)
    assert [(f.slug, f.severity) for f in found] == [("lr-zero", Severity.HINT)]
