"""Runs small scripts under the audit, in this process, and tells what was found."""

from __future__ import annotations

import textwrap
from pathlib import Path

from surefoot.core.finding import Finding, Severity
from surefoot.sanitizer.run import Request, run_here

CLASSIFIER = """
import torch
from torch import nn
import torch.nn.functional as F
torch.manual_seed(0)
x = torch.randn(64, 6)
y = (x @ torch.randn(6, 3)).argmax(1)
model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
opt = torch.optim.SGD(model.parameters(), lr=0.1)
def batches(n, size=8):
    for _ in range(n):
        at = torch.randint(0, 64, (size,))
        yield x[at], y[at]
def loss_of(xb, yb):
    return F.cross_entropy(model(xb), yb)
"""
OTHER_HANDS = """
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


def findings_of(folder: Path, source: str, preamble: str = CLASSIFIER) -> list[Finding]:
    """The findings on one script; fails where the script or the audit itself fails."""
    script = folder / "script.py"
    script.write_text(preamble + textwrap.dedent(source))
    summary, code = run_here(Request(str(script)), folder)
    assert summary.internal_errors == [], "\n".join(summary.internal_errors)
    assert code == 0
    return summary.findings


def check_bug(folder: Path, slug: str, source: str, preamble: str = CLASSIFIER) -> None:
    """The rule finds the bug, at a line of the script where it has a line at all."""
    found = [f for f in findings_of(folder, source, preamble) if f.slug == slug]
    assert found, f"{slug} was not found"
    assert all(f.file.endswith("script.py") or not f.file for f in found)
    assert all(f.evidence and f.message and f.fix for f in found)


def check_clean(folder: Path, slug: str, source: str, preamble: str = CLASSIFIER) -> None:
    """The near-miss is no finding of the rule, and nothing above a hint of any other."""
    found = findings_of(folder, source, preamble)
    assert [f.message for f in found if f.slug == slug] == []
    assert [(f.slug, f.message) for f in found if f.severity is not Severity.HINT] == []
