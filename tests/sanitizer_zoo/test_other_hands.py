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
class Words(nn.Module):
    def __init__(self, n=12):
        super().__init__()
        self.emb, self.mix, self.out = nn.Embedding(n, 6), nn.Linear(6, 6), nn.Linear(6, n, False)
    def forward(self, ids): return self.out(self.mix(self.emb(ids)).tanh())
def tell(words, n=8, fast=None):
    fast = fast or torch.optim.Adam(words.parameters(), lr=0.01)
    for _ in range(n):
        ids = torch.randint(0, len(words.emb.weight), (8, 13))
        loss = F.cross_entropy(words(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        fast.zero_grad(); loss.backward(); fast.step()
class Own(torch.optim.Optimizer):
    @torch.no_grad()
    def step(self):
        for p in self.param_groups[0]["params"]:
            more = self.state[p]
            mean = more.setdefault("mean", torch.zeros_like(p, dtype=torch.float))
            change = -self.defaults["lr"] * mean.lerp_(p.grad.float(), 0.1).sign()
            if self.defaults.get("keep"):
                rest = more.setdefault("rest", torch.zeros_like(p))
                wanted = rest.float() + change + p.float()
                p.copy_(wanted); rest.copy_(wanted - p.float())
            elif self.defaults.get("chance"):
                bits = (p.float() + change).view(torch.int32)
                chance = torch.randint(0, 1 << 16, p.shape, dtype=torch.int32)
                p.copy_((bits + chance & -(1 << 16)).view(torch.float))
            else:
                p.add_(change.bfloat16())
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
    (
        "optimizer-stale-params",
        """
        model[2] = nn.Linear(8, 3)
        for b in batches(8): update(b)
        """,
    ),
    (
        "optimizer-stale-params",
        """
        for b in batches(9): update(b)
        old, model[2] = model[2], nn.Linear(8, 5)  # two more classes
        model[2].weight.data[:3] = old.weight.data
        for xb, yb in batches(12): update((xb, yb + 2))
        """,
    ),
    (
        "param-not-in-optimizer",
        """
        for b in batches(9): update(b)
        model.append(nn.Linear(3, 3))  # the net grows
        for b in batches(12): update(b)
        """,
    ),
    (
        "param-frozen-by-mistake",
        """
        for b in batches(9): update(b)
        model[2] = nn.Linear(8, 3); nn.init.xavier_normal_(model[2].weight)
        for name, p in model.named_parameters(): p.requires_grad = name.startswith(("0", "head"))
        fast = torch.optim.Adam([p for p in model.parameters() if p.requires_grad])
        for b in batches(9): update(b, fast)
        """,
    ),
    (
        "tied-weights-broken",
        """
        words = Words()
        words.out.weight = words.emb.weight
        words.emb.weight = nn.Parameter(torch.randn(12, 6))
        tell(words)
        """,
    ),
    (
        "tied-weights-broken",
        """
        words = Words()
        words.out.weight = words.emb.weight
        words.load_state_dict({k: v.clone() for k, v in words.state_dict().items()}, assign=True)
        tell(words)
        """,
    ),
    (
        "tied-weights-broken",
        """
        words = Words()
        words.out.weight = words.emb.weight
        tell(words, 2)
        words.out = nn.Linear(6, 12, bias=False)
        tell(words)
        """,
    ),
    (
        "tied-weights-broken",
        """
        words, more = Words(), Words(16)  # the vocabulary grows
        more.emb.weight.data[:12] = words.emb.weight.data
        more.out.weight.data[:12] = words.emb.weight.data
        tell(more)
        """,
    ),
    (
        "low-precision-update-lost",
        """
        half = net().bfloat16()
        own = Own(half.parameters(), {"lr": 1e-5})
        for xb, yb in batches(20): update((xb.bfloat16(), yb), own, half)
        """,
    ),
    (
        "frozen-decayed",
        """
        model[0].weight.register_hook(torch.zeros_like)
        fast = torch.optim.AdamW(model.parameters(), weight_decay=0.1)
        for b in batches(8): update(b, fast)
        """,
    ),
    (
        "frozen-decayed",
        """
        words = Words()
        known = (torch.arange(12) >= 8).float()[:, None]
        words.emb.weight.register_hook(lambda g: g * known)
        tell(words, 12, torch.optim.AdamW(words.parameters(), weight_decay=0.1))
        """,
    ),
    (
        "frozen-decayed",
        """
        fast = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.01)
        for b in batches(12):
            opt.zero_grad(); loss_of(*b).backward()
            model[2].weight.grad[:2] = 0  # the old classes stay
            fast.step()
        """,
    ),
    (
        "data-repeated-batch",
        """
        def sample_batch(n=16):
            own = torch.Generator().manual_seed(3)
            at = torch.randint(0, 64, (n,), generator=own)
            return x[at], y[at]
        for _ in range(30): update(sample_batch())
        """,
    ),
    (
        "data-repeated-batch",
        """
        batch_size = 16
        at = torch.randint(0, 64, (batch_size,))
        for step in range(30): update((x[at], y[at]))
        """,
    ),
    (
        "data-repeated-batch",
        """
        def make_batches(batch_size=16):
            for part in torch.arange(64).split(batch_size): yield x[part], y[part]
        for step in range(30): update(next(make_batches()))
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
