"""Bugs in the styles of other people's scripts."""

from __future__ import annotations

from pathlib import Path

import pytest

from sanitizer_zoo.zoo import CLASSIFIER, OTHER_HANDS, check_bug

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
    (
        "clip-after-step",
        """
        parts = list(model.parameters())
        for b in batches(8):
            opt.zero_grad(); loss_of(*b).backward(); opt.step()
            norm = nn.utils.get_total_norm([p.grad for p in parts])
            nn.utils.clip_grads_with_norm_(parts, 1.0, norm)
        """,
    ),
    (
        "clip-after-step",
        """
        def closure():
            opt.zero_grad(); loss = loss_of(*next(more)); loss.backward()
            return loss
        more = batches(9)
        for _ in range(8):
            opt.step(closure)
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        """,
    ),
    (
        "missing-zero-grad",
        """
        def do_nothing_closure(): pass
        for b in batches(8): loss_of(*b).backward(); opt.step(closure=do_nothing_closure)
        """,
    ),
    (
        "lr-zero",
        """
        plan = torch.optim.lr_scheduler.LambdaLR(opt, lambda n: min(1, n // 50))
        for b in batches(12): update(b); plan.step()
        """,
    ),
    (
        "bn-batch-of-one",
        """
        own = nn.Sequential(nn.Conv1d(1, 4, 3), nn.BatchNorm1d(4), nn.Flatten(), nn.Linear(16, 3))
        fast = torch.optim.SGD(own.parameters(), lr=0.1)
        for xb, yb in batches(12, 1): update((xb[:, None], yb), fast, own)
        """,
    ),
    (
        "frozen-decayed",
        """
        fast = torch.optim.AdamW(model.parameters(), weight_decay=0.1)
        for b in batches(6): update(b, fast)
        model[0].requires_grad_(False)
        for b in batches(12):
            fast.zero_grad(set_to_none=False); loss_of(*b).backward(); fast.step()
        """,
    ),
    (
        "lm-not-causal",
        """
        class Look(Words):
            def __init__(self):
                super().__init__()
                self.conv = nn.Conv1d(6, 6, 3, padding=1)
            def forward(self, ids):
                return self.out(self.conv(self.emb(ids).transpose(1, 2)).transpose(1, 2).tanh())
        tell(Look())
        """,
    ),
    (
        "graph-retained",
        """
        kept = []
        for xb, yb in batches(24):
            out = model(xb); kept.append(out)
            opt.zero_grad(); F.cross_entropy(out, yb).backward(); opt.step()
        """,
    ),
    (
        "val-overlaps-train",
        """
        drawn = torch.cat([torch.arange(40), torch.randint(0, 12, (24,))])  # the rare ones again
        order = drawn[torch.randperm(64)]
        for epoch in range(3):
            model.train()
            for part in order[:40].split(8): update((x[part], y[part]))
            model.eval()
            with torch.no_grad(): model(x[order[40:]])
        """,
    ),
    (
        "sigmoid-before-bcelogits",
        """
        def chance(v): return 1 / (1 + torch.exp(-model(v)))
        for xb, yb in batches(12):
            loss = F.binary_cross_entropy_with_logits(chance(xb), F.one_hot(yb, 3).float())
            opt.zero_grad(); loss.backward(); opt.step()
        """,
    ),
    (
        "sched-wrong-unit",
        """
        plan = torch.optim.lr_scheduler.LambdaLR(opt, lambda n: 1 - n / 100)
        for epoch in range(5):
            for b in batches(20): update(b)
            plan.step()
        """,
    ),
    (
        "resume-missing-state",
        """
        fast = torch.optim.AdamW(model.parameters())
        file = io.BytesIO()
        for b in batches(9): update(b, fast)
        torch.save({"net": model.state_dict(), "done": 9}, file)
        saved = torch.load(io.BytesIO(file.getvalue()))
        model.load_state_dict(saved["net"])
        fast = torch.optim.AdamW(model.parameters())
        for b in batches(18 - saved["done"]): update(b, fast)
        """,
    ),
]


@pytest.mark.parametrize(("slug", "source"), BUGS)
def test_bug_is_found(tmp_path: Path, slug: str, source: str) -> None:
    check_bug(tmp_path, slug, source, CLASSIFIER + OTHER_HANDS)
