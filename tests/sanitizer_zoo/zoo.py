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
