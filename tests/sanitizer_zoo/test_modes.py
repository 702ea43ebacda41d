"""Modes and normalisation: bugs of two styles each, and near-misses."""

from __future__ import annotations

from pathlib import Path

import pytest

from sanitizer_zoo.zoo import check_bug, check_clean

MODES = """
import copy
net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 3))
opt = torch.optim.SGD(net.parameters(), lr=0.05)
def train(n=6, m=None):
    for xb, yb in batches(n):
        opt.zero_grad(); F.cross_entropy((m or net)(xb), yb).backward(); opt.step()
def measure(m=None):
    return sum(F.cross_entropy((m or net)(xb), yb).item() for xb, yb in batches(4))
"""

BUGS = [
    (
        "train-in-eval-mode",
        """
net.train()
for epoch in range(3):
    train(); net.eval()
    with torch.no_grad(): measure()
""",
    ),
    (
        "train-in-eval-mode",
        """
train(4)
net.train(False)
print(measure_later := None)
train(8)
""",
    ),
    (
        "train-in-eval-mode",
        """
class Trainer:
    def __init__(self, network):
        self.network, self.mode = network, "eval"
    def fit(self):
        for _ in range(3):
            getattr(self.network, self.mode)()
            train(5, self.network)
Trainer(net).fit()
""",
    ),
    (
        "train-in-eval-mode",
        """
class Lines(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn, self.out = nn.GRU(6, 8, 2, dropout=0.3, batch_first=True), nn.Linear(8, 3)
    def forward(self, v): return self.out(self.rnn(v[:, None])[0][:, -1])
lines = Lines(); opt = torch.optim.Adam(lines.parameters(), lr=0.01)
def accuracy():
    lines.eval()
    with torch.no_grad(): return [lines(xb).argmax(1).eq(yb).sum() for xb, yb in batches(2)]
before = accuracy(); train(9, lines); after = accuracy()
""",
    ),
    (
        "eval-in-train-mode",
        """
for epoch in range(3):
    net.train(); train(8)
    with torch.no_grad(): measure()
""",
    ),
    (
        "eval-in-train-mode",
        """
@torch.inference_mode()
def validate(): return measure()
train(12); validate()
""",
    ),
    (
        "eval-with-grad",
        """
for epoch in range(3):
    net.train(); train(); net.eval(); measure()
""",
    ),
    (
        "eval-in-train-mode",
        """
slow = copy.deepcopy(net)
def follow():
    with torch.no_grad():
        for kept, new in zip(slow.parameters(), net.parameters()): kept.lerp_(new, 0.5)
for epoch in range(4):
    train(8); follow()
    with torch.no_grad(): measure(slow)
""",
    ),
    (
        "eval-in-train-mode",
        """
from torch.optim.swa_utils import AveragedModel
class Run:
    def __init__(self): self.mean = AveragedModel(net)
    @torch.no_grad()
    def test(self): return [self.mean(xb).argmax(1) for xb, _ in batches(3)]
run = Run(); train(8); run.mean.update_parameters(net); run.test()
""",
    ),
    (
        "eval-with-grad",
        """
from torch.optim.swa_utils import AveragedModel
mean = AveragedModel(net)
for epoch in range(3):
    train(8); mean.update_parameters(net)
    mean.eval(); scores = [F.cross_entropy(mean(xb), yb) for xb, yb in batches(3)]
""",
    ),
    (
        "eval-with-grad",
        """
read, write = net[:4].eval(), net[4]
def validate(): return [F.cross_entropy(write(read(xb)), yb) for xb, yb in batches(4)]
for epoch in range(2):
    read.train(); write.train(); train(6)
    read.eval(); write.eval(); losses = validate()
""",
    ),
    (
        "eval-with-grad",
        """
train(8)
best = net.eval()
scores = [best(xb).argmax(1).eq(yb).float().mean() for xb, yb in batches(6)]
""",
    ),
    (
        "dropout-in-eval",
        """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(6, 3)
    def forward(self, v): return self.fc(F.dropout(v, 0.5))
net = Net(); opt = torch.optim.SGD(net.parameters(), lr=0.1)
train(); net.eval()
with torch.no_grad(): measure()
""",
    ),
    (
        "dropout-in-eval",
        """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.extras = nn.Linear(6, 3), [nn.Dropout(0.3)]
    def forward(self, v):
        for extra in self.extras: v = extra(v)
        return self.fc(v)
net = Net(); opt = torch.optim.SGD(net.parameters(), lr=0.1)
train(); net.eval()
with torch.no_grad(): measure()
""",
    ),
    (
        "teacher-in-train-mode",
        """
teacher = copy.deepcopy(net)
for xb, yb in batches(10):
    with torch.no_grad(): goal = teacher(xb).softmax(1)
    opt.zero_grad(); F.l1_loss(net(xb).softmax(1), goal).backward(); opt.step()
""",
    ),
    (
        "teacher-in-train-mode",
        """
teacher = copy.deepcopy(net).requires_grad_(False)
for xb, _ in batches(10):
    opt.zero_grad(); F.mse_loss(net(xb), teacher(xb)).backward(); opt.step()
""",
    ),
    (
        "target-not-detached",
        """
q = nn.Linear(6, 2); opt = torch.optim.SGD(q.parameters(), lr=0.1)
for xb, yb in batches(8):
    goal = yb + 0.9 * q(xb + 1).max(1).values
    opt.zero_grad(); F.mse_loss(q(xb)[:, 0], goal).backward(); opt.step()
""",
    ),
    (
        "target-not-detached",
        """
v = nn.Linear(6, 1); opt = torch.optim.SGD(v.parameters(), lr=0.1)
for xb, yb in batches(8):
    error = yb.float() + 0.9 * v(xb.flip(0)).squeeze(1) - v(xb).squeeze(1)
    opt.zero_grad(); (error ** 2).mean().backward(); opt.step()
""",
    ),
    (
        "frozen-bn-drift",
        """
net[0].requires_grad_(False); net[1].requires_grad_(False)
opt = torch.optim.SGD(net[4].parameters(), lr=0.1)
train()
""",
    ),
    (
        "frozen-bn-drift",
        """
body = nn.Sequential(net[0], net[1])
for p in body.parameters(): p.requires_grad = False
head = nn.Linear(8, 3); opt = torch.optim.Adam(head.parameters())
train(8, nn.Sequential(body, head))
""",
    ),
    (
        "bn-batch-of-one",
        """
from torch.utils.data import DataLoader, TensorDataset
net = nn.Sequential(nn.Conv1d(2, 4, 2), nn.BatchNorm1d(4), nn.Flatten(), nn.Linear(8, 3))
opt = torch.optim.SGD(net.parameters(), lr=0.05)
loader = DataLoader(TensorDataset(x[:33].view(33, 2, 3), y[:33]), 8, shuffle=True)
for epoch in range(2):
    for xb, yb in loader:
        opt.zero_grad(); F.cross_entropy(net(xb), yb).backward(); opt.step()
""",
    ),
    (
        "bn-batch-of-one",
        """
net = nn.Sequential(nn.Conv1d(2, 4, 2), nn.BatchNorm1d(4), nn.Flatten(), nn.Linear(8, 3))
opt = torch.optim.SGD(net.parameters(), lr=0.05)
for part in torch.randperm(25).split(6):
    opt.zero_grad()
    F.cross_entropy(net(x[part].view(-1, 2, 3)), y[part]).backward(); opt.step()
""",
    ),
    (
        "swa-bn-not-updated",
        """
from torch.optim.swa_utils import AveragedModel
swa = AveragedModel(net)
for _ in range(3): train(3); swa.update_parameters(net)
swa.eval()
with torch.no_grad(): measure(swa)
""",
    ),
    (
        "swa-bn-not-updated",
        """
from torch.optim import swa_utils
swa = swa_utils.AveragedModel(net)
train(3); swa.update_parameters(net)
swa_utils.update_bn(((b[0],) for b in batches(3)), swa)
train(3); swa.update_parameters(net); swa.eval()
with torch.no_grad(): measure(swa)
""",
    ),
]

CLEAN = [
    (
        "train-in-eval-mode",
        """
for epoch in range(3):
    net.train(); train(); net.eval()
    with torch.no_grad(): measure()
""",
    ),
    (
        "train-in-eval-mode",
        """
net.train(); net[1].eval()
train(8)
""",
    ),
    (
        "train-in-eval-mode",
        """
body, head = net[:4], nn.Linear(8, 3)
both = nn.ModuleDict({"body": body, "head": head})
opt = torch.optim.Adam(both.parameters(), lr=0.01)
both.train(); body.eval()
for xb, yb in batches(8):
    opt.zero_grad(); F.cross_entropy(head(body(xb)), yb).backward(); opt.step()
""",
    ),
    (
        "train-in-eval-mode",
        """
maker, judge = nn.Linear(6, 6), nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.3), nn.Linear(8, 1))
make, rule = (torch.optim.Adam(m.parameters(), lr=0.01) for m in (maker, judge))
for xb, _ in batches(8):
    judge.eval(); make.zero_grad()
    F.softplus(-judge(maker(xb))).mean().backward(); make.step()
    judge.train(); rule.zero_grad()
    (F.softplus(-judge(xb)) + F.softplus(judge(maker(xb).detach()))).mean().backward(); rule.step()
""",
    ),
    (
        "eval-in-train-mode",
        """
train(8); net.eval()
for m in net.modules():
    if isinstance(m, nn.Dropout): m.train()
with torch.no_grad(): measure()
""",
    ),
    (
        "eval-in-train-mode",
        """
other, spare = copy.deepcopy(net), copy.deepcopy(net)
train(8)
with torch.no_grad(): shape = other(x[:4]).shape, spare(x[:4]).shape
opt = torch.optim.SGD(other.parameters(), lr=0.05); train(8, other)
""",
    ),
    (
        "eval-in-train-mode",
        """
keys = copy.deepcopy(net)
for xb, yb in batches(9):
    with torch.no_grad(): wanted = keys(xb)
    opt.zero_grad(); F.mse_loss(net(xb), wanted).backward(); opt.step()
    with torch.no_grad():
        for kept, new in zip(keys.parameters(), net.parameters()): kept.lerp_(new, 0.5)
train(24)
""",
    ),
    (
        "eval-with-grad",
        """
goal = copy.deepcopy(net).eval()
for xb, yb in batches(9):
    wanted = goal(xb).detach()
    opt.zero_grad(); F.mse_loss(net(xb), wanted).backward(); opt.step()
    with torch.no_grad():
        for kept, new in zip(goal.parameters(), net.parameters()): kept.lerp_(new, 0.5)
""",
    ),
    (
        "eval-in-train-mode",
        """
net = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 3))
opt = torch.optim.SGD(net.parameters(), lr=0.05)
train(8)
with torch.no_grad(): measure()
""",
    ),
    (
        "eval-with-grad",
        """
train(8); net.eval()
for xb, yb in batches(4):
    xb.requires_grad_()
    torch.autograd.grad(F.cross_entropy(net(xb), yb), xb)
""",
    ),
    (
        "eval-with-grad",
        """
train(8); net.eval()
with torch.inference_mode(): measure()
""",
    ),
    (
        "dropout-in-eval",
        """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(6, 3)
    def forward(self, v): return self.fc(F.dropout(v, 0.5, self.training))
net = Net(); opt = torch.optim.SGD(net.parameters(), lr=0.1)
train(); net.eval()
with torch.no_grad(): measure()
""",
    ),
    (
        "dropout-in-eval",
        """
train(); net.eval(); net[3].train()
with torch.no_grad(): measure()
""",
    ),
    (
        "teacher-in-train-mode",
        """
teacher = copy.deepcopy(net).eval()
for xb, _ in batches(10):
    with torch.no_grad(): goal = teacher(xb)
    opt.zero_grad(); F.mse_loss(net(xb), goal).backward(); opt.step()
""",
    ),
    (
        "teacher-in-train-mode",
        """
teacher = copy.deepcopy(net).requires_grad_(False)
for xb, _ in batches(10):
    opt.zero_grad(); F.mse_loss(net(xb), teacher(xb)).backward(); opt.step()
    with torch.no_grad():
        for t, p in zip(teacher.parameters(), net.parameters()): t.lerp_(p, 0.1)
""",
    ),
    (
        "target-not-detached",
        """
q = nn.Linear(6, 2); opt = torch.optim.SGD(q.parameters(), lr=0.1)
for xb, yb in batches(8):
    goal = (yb + 0.9 * q(xb + 1).max(1).values).detach()
    opt.zero_grad(); F.mse_loss(q(xb)[:, 0], goal).backward(); opt.step()
""",
    ),
    (
        "target-not-detached",
        """
for xb, yb in batches(8):
    opt.zero_grad()
    one, two = net(xb), net(xb)  # two masks: a consistency loss
    (F.cross_entropy(one, yb) + F.mse_loss(one, two)).backward(); opt.step()
""",
    ),
    (
        "frozen-bn-drift",
        """
net[0].requires_grad_(False); net[1].requires_grad_(False)
opt = torch.optim.SGD(net[4].parameters(), lr=0.1)
net[1].eval(); train()
""",
    ),
    (
        "frozen-bn-drift",
        """
net[1] = nn.BatchNorm1d(8, affine=False)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
train()
""",
    ),
    (
        "bn-batch-of-one",
        """
for part in torch.randperm(25)[:24].split(6):
    opt.zero_grad(); F.cross_entropy(net(x[part]), y[part]).backward(); opt.step()
""",
    ),
    (
        "bn-batch-of-one",
        """
train(); net.eval()
with torch.no_grad(): net(x[:1])
""",
    ),
    (
        "swa-bn-not-updated",
        """
from torch.optim.swa_utils import AveragedModel, update_bn
swa = AveragedModel(net)
for _ in range(3): train(3); swa.update_parameters(net)
update_bn(((b[0],) for b in batches(3)), swa); swa.eval()
with torch.no_grad(): measure(swa)
""",
    ),
    (
        "swa-bn-not-updated",
        """
from torch.optim.swa_utils import AveragedModel
swa = AveragedModel(net, use_buffers=True)
for _ in range(3): train(3); swa.update_parameters(net)
swa.eval()
with torch.no_grad(): measure(swa)
""",
    ),
]


@pytest.mark.parametrize(("slug", "source"), BUGS)
def test_bug_is_found(tmp_path: Path, slug: str, source: str) -> None:
    check_bug(tmp_path, slug, MODES + source)


@pytest.mark.parametrize(("slug", "source"), CLEAN)
def test_near_miss_is_quiet(tmp_path: Path, slug: str, source: str) -> None:
    check_clean(tmp_path, slug, MODES + source)
