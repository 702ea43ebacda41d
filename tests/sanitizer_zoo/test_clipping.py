"""Clipping and gradient lifecycle: bugs of two styles each, and near-misses."""

from __future__ import annotations

from pathlib import Path

import pytest

from sanitizer_zoo.zoo import check_bug, check_clean

BUGS = [
    (
        "clip-after-step",
        """
        for b in batches(8):
            opt.zero_grad(); loss_of(*b).backward(); opt.step()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        """,
    ),
    (
        "clip-after-step",
        """
        from torch.nn.utils import clip_grad_value_
        class Loop:
            def update(self, b):
                loss_of(*b).backward()
                opt.step()
                clip_grad_value_(list(model.parameters()), 0.01)
                for p in model.parameters():
                    p.grad = None
        loop = Loop()
        for b in batches(8):
            loop.update(b)
        """,
    ),
    (
        "clip-before-backward",
        """
        for b in batches(8):
            opt.zero_grad()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            loss_of(*b).backward(); opt.step()
        """,
    ),
    (
        "clip-before-backward",
        """
        def clipped_loss(b):
            loss = loss_of(*b)
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            return loss
        for b in batches(8):
            opt.zero_grad(set_to_none=False)
            clipped_loss(b).backward(); opt.step()
        """,
    ),
    (
        "clip-wrong-params",
        """
        import copy
        old = copy.deepcopy(model)
        for b in batches(8):
            opt.zero_grad(); loss_of(*b).backward()
            nn.utils.clip_grad_norm_(old.parameters(), 0.1)
            opt.step()
        """,
    ),
    (
        "clip-wrong-params",
        """
        extra = nn.Linear(3, 3)
        params = list(extra.parameters())
        for b in batches(8):
            loss_of(*b).backward()
            nn.utils.clip_grad_norm_(params, 0.1)
            opt.step(); opt.zero_grad()
        """,
    ),
    (
        "clip-per-microstep",
        """
        for i, b in enumerate(batches(16)):
            (loss_of(*b) / 4).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            if i % 4 == 3:
                opt.step(); opt.zero_grad()
        """,
    ),
    (
        "clip-per-microstep",
        """
        def micro(b):
            loss_of(*b).div(2).backward()
            nn.utils.clip_grad_value_(model.parameters(), 0.01)
        for _ in range(6):
            opt.zero_grad()
            for b in batches(2): micro(b)
            opt.step()
        """,
    ),
    (
        "clip-scaled-grads",
        """
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
        for b in batches(8):
            opt.zero_grad(); scaler.scale(loss_of(*b)).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            scaler.step(opt); scaler.update()
        """,
    ),
    (
        "clip-scaled-grads",
        """
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        class Amp:
            def __call__(self, loss):
                scaler.scale(loss).backward()
                nn.utils.clip_grad_value_(model.parameters(), 1.0)
                scaler.unscale_(opt)
                scaler.step(opt); scaler.update(); opt.zero_grad()
        amp = Amp()
        for b in batches(8): amp(loss_of(*b))
        """,
    ),
    (
        "missing-zero-grad",
        """
        for b in batches(8):
            loss_of(*b).backward(); opt.step()
        """,
    ),
    (
        "missing-zero-grad",
        """
        opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
        for epoch in range(3):
            opt.zero_grad()
            for b in batches(5):
                loss_of(*b).backward(); opt.step()
        """,
    ),
    (
        "zero-grad-before-step",
        """
        for b in batches(8):
            loss_of(*b).backward(); opt.zero_grad(); opt.step()
        """,
    ),
    (
        "zero-grad-before-step",
        """
        for b in batches(8):
            loss_of(*b).backward()
            for p in model.parameters(): p.grad = None
            opt.step()
        """,
    ),
    (
        "double-backward",
        """
        for b in batches(8):
            opt.zero_grad(); loss = loss_of(*b)
            loss.backward(retain_graph=True); loss.backward(); opt.step()
        """,
    ),
    (
        "double-backward",
        """
        def backward(loss):
            torch.autograd.backward(loss, retain_graph=True)
        for b in batches(8):
            opt.zero_grad(); loss = loss_of(*b)
            backward(loss); backward(loss); opt.step()
        """,
    ),
    (
        "double-backward",
        """
        for xb, yb in batches(8):
            opt.zero_grad()
            F.cross_entropy(model(xb), yb).backward()
            F.cross_entropy(model(xb), yb).backward()
            opt.step()
        """,
    ),
    (
        "double-backward",
        """
        class Step:
            def __init__(self, loss): self.loss = loss
            def backward(self, batch):
                loss = self.loss(*batch)
                loss.backward()
                return loss.detach()
        step = Step(loss_of)
        for batch in batches(8):
            opt.zero_grad(); loss_of(*batch).backward()
            value = step.backward(batch)
            opt.step()
        """,
    ),
]

CLEAN = [
    (
        "clip-after-step",
        """
        for b in batches(8):
            opt.zero_grad(); loss_of(*b).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1); opt.step()
        """,
    ),
    (
        "clip-after-step",
        """
        second = torch.optim.Adam(model.parameters(), lr=1e-4)
        for b in batches(8):
            opt.zero_grad(); loss_of(*b).backward(); opt.step()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1); second.step()
        """,
    ),
    (
        "clip-before-backward",
        """
        for b in batches(8):
            loss_of(*b).backward()
            nn.utils.clip_grad_value_(model.parameters(), 0.1)
            opt.step(); opt.zero_grad()
        """,
    ),
    (
        "clip-before-backward",
        """
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        opt = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)
        def closure():
            opt.zero_grad(); loss = loss_of(x, y); loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            return loss
        for _ in range(5): opt.step(closure)
        """,
    ),
    (
        "clip-wrong-params",
        """
        other = nn.Linear(3, 3)
        opt2 = torch.optim.SGD(other.parameters(), lr=0.1)
        for xb, yb in batches(8):
            opt.zero_grad(); opt2.zero_grad()
            F.cross_entropy(other(model(xb)), yb).backward()
            nn.utils.clip_grad_norm_(other.parameters(), 0.1)
            opt.step(); opt2.step()
        """,
    ),
    (
        "clip-wrong-params",
        """
        half = nn.Sequential(nn.Linear(6, 3)).bfloat16()
        master = [p.detach().float().requires_grad_() for p in half.parameters()]
        opt = torch.optim.SGD(master, lr=0.1)
        for xb, yb in batches(8):
            for p in half.parameters(): p.grad = None
            F.cross_entropy(half(xb.bfloat16()).float(), yb).backward()
            nn.utils.clip_grad_norm_(half.parameters(), 0.1)
            for m, p in zip(master, half.parameters()): m.grad = p.grad.float()
            opt.step()
            with torch.no_grad():
                for m, p in zip(master, half.parameters()): p.copy_(m)
        """,
    ),
    (
        "clip-per-microstep",
        """
        for _ in range(4):
            opt.zero_grad()
            for b in batches(4): (loss_of(*b) / 4).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1); opt.step()
        """,
    ),
    (
        "clip-per-microstep",
        """
        for b in batches(8):
            opt.zero_grad(); loss_of(*b).backward()
            for layer in (model[0], model[2]):
                nn.utils.clip_grad_norm_(layer.parameters(), 0.1)
            opt.step()
        """,
    ),
    (
        "clip-scaled-grads",
        """
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
        for b in batches(8):
            opt.zero_grad(); scaler.scale(loss_of(*b)).backward(); scaler.unscale_(opt)
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            scaler.step(opt); scaler.update()
        """,
    ),
    (
        "clip-scaled-grads",
        """
        scaler = torch.amp.GradScaler("cpu", enabled=False)
        for b in batches(8):
            opt.zero_grad(); scaler.scale(loss_of(*b)).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            scaler.step(opt); scaler.update()
        """,
    ),
    (
        "missing-zero-grad",
        """
        for b in batches(8):
            model.zero_grad(); loss_of(*b).backward(); opt.step()
        """,
    ),
    (
        "missing-zero-grad",
        """
        for b in batches(8):
            loss_of(*b).backward(); opt.step()
            torch._foreach_zero_([p.grad for p in model.parameters()])
        """,
    ),
    (
        "zero-grad-before-step",
        """
        def fused(p):
            opts[p].step(); opts[p].zero_grad()
        opts = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}
        for p in opts: p.register_post_accumulate_grad_hook(fused)
        for b in batches(8): loss_of(*b).backward()
        """,
    ),
    (
        "zero-grad-before-step",
        """
        for b in batches(8):
            loss_of(*b).backward(); opt.step(); opt.zero_grad()
        """,
    ),
    (
        "double-backward",
        """
        xb, yb = next(batches(1))
        for _ in range(8):
            opt.zero_grad(set_to_none=True)
            (loss_of(xb, yb) / 2).backward()
            (loss_of(x[:8], y[:8]) / 2).backward()
            opt.step()
        """,
    ),
    (
        "double-backward",
        """
        net = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 3))
        opt = torch.optim.SGD(net.parameters(), lr=0.1)
        for xb, yb in batches(8):
            opt.zero_grad()
            (F.cross_entropy(net(xb), yb) / 2).backward()
            (F.cross_entropy(net(xb), yb) / 2).backward()
            opt.step()
        """,
    ),
    (
        "double-backward",
        """
        for xb, yb in batches(8):
            opt.zero_grad(); out = model(xb)
            F.cross_entropy(out, yb).backward(retain_graph=True)
            (0.01 * out.pow(2).mean()).backward(); opt.step()
        """,
    ),
    (
        "double-backward",
        """
        for b in batches(8):
            opt.zero_grad(); loss = loss_of(*b)
            torch.autograd.grad(loss, model[0].weight, retain_graph=True)
            loss.backward(); opt.step()
        """,
    ),
]


@pytest.mark.parametrize(("slug", "source"), BUGS)
def test_bug_is_found(tmp_path: Path, slug: str, source: str) -> None:
    check_bug(tmp_path, slug, source)


@pytest.mark.parametrize(("slug", "source"), CLEAN)
def test_near_miss_is_quiet(tmp_path: Path, slug: str, source: str) -> None:
    check_clean(tmp_path, slug, source)
