"""Optimizer configuration and parameter coverage: bugs of two styles each, and near-misses."""

from __future__ import annotations

from pathlib import Path

import pytest

from sanitizer_zoo.zoo import check_bug, check_clean

COVER = """
import copy
from torch.optim import SGD, Adam, AdamW
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.norm = nn.Linear(6, 8), nn.LayerNorm(8)
        self.head, self.aux = nn.Linear(8, 3), nn.Linear(8, 1)
        self.shift = nn.Parameter(torch.zeros(8))
    def hidden(self, v): return self.norm(self.body(v).relu() + self.shift)
    def forward(self, v):
        h = self.hidden(v)
        return self.head(h), self.aux(h)
net = Net()
def both(xb, yb):
    out, aux = net(xb)
    return F.cross_entropy(out, yb) + 0.1 * F.mse_loss(aux[:, 0], xb[:, 0])
def train(opt, n=8, loss=both):
    for xb, yb in batches(n):
        opt.zero_grad(); loss(xb, yb).backward(); opt.step()
"""

BUGS = [
    ("decay-norm-bias", "train(AdamW(net.parameters(), lr=1e-3, weight_decay=0.1))"),
    (
        "decay-norm-bias",
        """
named = dict(net.named_parameters())
no = [p for n, p in named.items() if "LayerNorm" in n]
yes = [p for n, p in named.items() if "LayerNorm" not in n]
train(AdamW([{"params": yes, "weight_decay": 0.05}, {"params": no or [nn.Parameter(x)],
    "weight_decay": 0.0}], lr=1e-3))
""",
    ),
    ("adam-l2", "train(Adam(net.parameters(), lr=1e-3, weight_decay=0.01))"),
    (
        "adam-l2",
        "train(torch.optim.NAdam([{'params': list(net.parameters()), 'weight_decay': 0.1}]))",
    ),
    (
        "frozen-decayed",
        """
opt = AdamW(net.parameters(), lr=0.01, weight_decay=0.1)
for b in batches(8):
    opt.zero_grad(); both(*b).backward()
    for p in net.body.parameters(): p.grad.zero_()
    opt.step()
""",
    ),
    (
        "frozen-decayed",
        """
opt = SGD(net.parameters(), lr=0.1, weight_decay=0.1)
def freeze():
    with torch.no_grad(): torch._foreach_mul_([net.body.weight.grad], 0.0)
for b in batches(8):
    net.zero_grad(set_to_none=False); both(*b).backward(); freeze(); opt.step()
""",
    ),
    (
        "param-not-in-optimizer",
        "train(SGD([p for m in net.children() for p in m.parameters()], lr=0.1))",
    ),
    (
        "param-not-in-optimizer",
        """
opt = Adam([*net.body.parameters(), *net.norm.parameters(), *net.head.parameters(), net.shift])
train(opt)
""",
    ),
    (
        "param-not-in-optimizer",
        """
class Pair:
    def __init__(self):
        self.read, self.write = nn.Sequential(nn.Linear(6, 8), nn.Tanh()), nn.Linear(8, 3)
        self.optimizer = Adam(self.write.parameters(), lr=0.01)
    def step(self, batch):
        self.optimizer.zero_grad(); self.read.zero_grad()
        F.cross_entropy(self.write(self.read(batch["x"])), batch["y"]).backward()
        for part in (self.read, self.write): nn.utils.clip_grad_norm_(part.parameters(), 1.0)
        self.optimizer.step()
pair = Pair()
for xb, yb in batches(8): pair.step({"x": xb, "y": yb})
""",
    ),
    (
        "param-not-in-optimizer",
        """
def fit(encoder, decoder):
    optimizer = SGD(decoder.parameters(), 0.1)
    encoder.train(); decoder.train()
    for xb, yb in batches(8):
        optimizer.zero_grad()
        F.cross_entropy(decoder(encoder(xb)), yb).backward()
        optimizer.step()
fit(nn.Sequential(nn.Linear(6, 8), nn.ReLU()), nn.Linear(8, 3))
""",
    ),
    (
        "param-not-in-optimizer",
        """
body, rebuild = nn.Sequential(nn.Linear(6, 4), nn.ReLU()), nn.Linear(4, 6)
opt = AdamW(list(body.parameters()), lr=0.01)
for xb, _ in batches(8):
    opt.zero_grad(); F.mse_loss(rebuild(body(xb)), xb).backward(); opt.step()
""",
    ),
    (
        "param-not-in-optimizer",
        """
train(SGD(net.parameters(), lr=0.1), 20)
net.requires_grad_(False); net.eval()
probe = nn.Linear(8, 5); opt = Adam(net.head.parameters(), lr=0.01)
for xb, yb in batches(12):
    opt.zero_grad(); F.cross_entropy(probe(net.hidden(xb)), yb).backward(); opt.step()
""",
    ),
    (
        "param-not-in-optimizer",
        """
left, right = nn.Sequential(nn.Linear(6, 4), nn.ReLU()), nn.Sequential(nn.Linear(6, 5), nn.ReLU())
lift, of_left, of_right = nn.Linear(5, 4), nn.Linear(4, 3), nn.Linear(4, 3)
opt = Adam([p for m in (left, right, lift, of_left) for p in m.parameters()], lr=0.01)
for xb, _ in batches(8):
    scores = of_left(left(xb)) @ of_right(lift(right(xb))).T
    opt.zero_grad(); F.cross_entropy(scores, torch.arange(len(xb))).backward(); opt.step()
""",
    ),
    (
        "unregistered-submodule",
        """
class Deep(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers, self.out = [nn.Linear(6, 6) for _ in range(2)], nn.Linear(6, 3)
    def forward(self, v):
        for layer in self.layers: v = layer(v).relu()
        return self.out(v)
deep = Deep()
train(SGD(deep.parameters(), lr=0.1), loss=lambda xb, yb: F.cross_entropy(deep(xb), yb))
""",
    ),
    (
        "unregistered-submodule",
        """
class Keyed(nn.Module):
    def __init__(self):
        super().__init__()
        self.parts, self.out = {"a": nn.Conv1d(1, 2, 3)}, nn.Linear(8, 3)
    def forward(self, v): return self.out(self.parts["a"](v[:, None]).flatten(1))
keyed = Keyed()
train(Adam(keyed.parameters()), loss=lambda xb, yb: F.cross_entropy(keyed(xb), yb))
""",
    ),
    (
        "optimizer-stale-params",
        """
opt = SGD(net.parameters(), lr=0.1)
train(opt, 4)
net = copy.deepcopy(net)
train(opt, 12)
""",
    ),
    (
        "optimizer-stale-params",
        """
opt = Adam(model.parameters())
model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
train(opt, 12, loss_of)
""",
    ),
    (
        "optimizer-never-stepped",
        """
one, two = SGD(net.head.parameters(), lr=0.1), SGD([*net.body.parameters(),
    *net.norm.parameters(), *net.aux.parameters(), net.shift], lr=0.1)
for b in batches(20):
    net.zero_grad(); both(*b).backward(); one.step()
""",
    ),
    (
        "optimizer-never-stepped",
        """
opts = [Adam(m.parameters()) for m in (net.body, net.norm, net.head, net.aux)] + [Adam([net.shift])]
for b in batches(15):
    for o in opts: o.zero_grad()
    both(*b).backward()
    for o in opts[:4]: o.step()
""",
    ),
    (
        "optimizer-never-stepped",
        """
train(SGD(net.parameters(), lr=0.1))
def tune(parts, rate):
    optimizer = Adam([p for part in parts for p in part.parameters()], lr=rate)
    for b in batches(14):
        both(*b).backward()
        optimizer.zero_grad()
tune([net.body, net.head], 1e-3)
train(SGD(net.parameters(), lr=0.01))
""",
    ),
    (
        "param-no-grad",
        """
def loss(xb, yb):
    out, aux = net(xb)
    return F.cross_entropy(out, yb) + 0.1 * F.mse_loss(aux[:, 0], xb[:, 0]).detach()
train(SGD(net.parameters(), lr=0.1), loss=loss)
""",
    ),
    (
        "param-no-grad",
        """
net.hidden = lambda v: net.norm(net.body(v).relu().data + net.shift)
train(Adam(net.parameters()))
""",
    ),
    (
        "param-frozen-by-mistake",
        """
net.aux.requires_grad_(False)  # the last layer made
fresh = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 3))
fresh[2].requires_grad_(False)
train(SGD(fresh[0].parameters(), lr=0.1), loss=lambda a, b: F.cross_entropy(fresh(a), b))
""",
    ),
    (
        "param-frozen-by-mistake",
        """
net = nn.Sequential(nn.Conv1d(1, 8, 3), nn.Flatten(), nn.Linear(32, 3))
for n, p in net.named_parameters(): p.requires_grad = n.startswith("0")
train(Adam([p for p in net.parameters() if p.requires_grad]),
    loss=lambda a, b: F.cross_entropy(net(a[:, None]), b))
""",
    ),
    (
        "tied-weights-broken",
        """
enc, dec = nn.Linear(6, 4, bias=False), nn.Linear(4, 6, bias=False)
dec.weight.data.copy_(enc.weight.data.t())
auto = nn.Sequential(enc, dec)
train(SGD(auto.parameters(), lr=0.1), loss=lambda a, b: F.mse_loss(auto(a), a))
""",
    ),
    (
        "tied-weights-broken",
        """
class LM(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb, self.out = nn.Embedding(9, 8), nn.Linear(8, 9)
        self.out.weight = nn.Parameter(self.emb.weight.clone())
    def forward(self, ids): return self.out(self.emb(ids))
lm = LM(); ids = torch.arange(9)
train(SGD(lm.parameters(), lr=0.1), loss=lambda a, b: F.cross_entropy(lm(ids), ids.flip(0)))
""",
    ),
    (
        "low-precision-update-lost",
        """
half = nn.Linear(6, 3).bfloat16()
train(Adam(half.parameters(), lr=1e-6),
    loss=lambda a, b: F.cross_entropy(half(a.bfloat16()).float(), b))
""",
    ),
    (
        "low-precision-update-lost",
        """
half = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)).to(torch.float16)
train(SGD(half.parameters(), lr=1e-7),
    loss=lambda a, b: F.cross_entropy(half(a.half()).float(), b))
""",
    ),
]

CLEAN = [
    ("decay-norm-bias", "train(SGD(net.parameters(), lr=0.1, weight_decay=0.1))"),
    (
        "decay-norm-bias",
        """
ps = list(net.parameters())
train(AdamW([{"params": [p for p in ps if p.dim() > 1]},
    {"params": [p for p in ps if p.dim() < 2], "weight_decay": 0.0}], lr=1e-3))
""",
    ),
    ("adam-l2", "train(AdamW(net.parameters(), lr=1e-3, weight_decay=0.01))"),
    (
        "adam-l2",
        "train(Adam(net.parameters(), lr=1e-3, weight_decay=0.01, decoupled_weight_decay=True))",
    ),
    (
        "frozen-decayed",
        """
opt = AdamW(net.parameters(), lr=0.01)
for b in batches(8):
    opt.zero_grad(); both(*b).backward()
    for p in net.body.parameters(): p.grad = None
    opt.step()
""",
    ),
    (
        "frozen-decayed",
        """
opt = SGD(net.parameters(), lr=0.1)
for b in batches(8):
    opt.zero_grad(); both(*b).backward(); net.body.weight.grad.zero_(); opt.step()
""",
    ),
    ("param-not-in-optimizer", "train(SGD(net.parameters(), lr=0.1))"),
    (
        "param-not-in-optimizer",
        """
opt = SGD([p for n, p in net.named_parameters() if n != "shift"], lr=0.1)
for b in batches(8):
    net.zero_grad(); both(*b).backward(); opt.step()
    with torch.no_grad(): net.shift -= 0.1 * net.shift.grad
""",
    ),
    (
        "param-not-in-optimizer",
        """
teacher, student = nn.Linear(6, 3), nn.Linear(6, 3)
opt = SGD(student.parameters(), lr=0.1)
for xb, _ in batches(8):
    opt.zero_grad(); F.mse_loss(student(xb), teacher(xb)).backward(); opt.step()
weights = student.state_dict()
""",
    ),
    (
        "param-not-in-optimizer",
        """
class Plain:
    def __init__(self, module): self.module = module
    def step(self):
        for p in self.module.parameters(): p.data.add_(p.grad, alpha=-0.1); p.grad = None
low, high = nn.Linear(6, 8), nn.Linear(8, 3)
low.train(); high.train()
mine, opt = Plain(low), SGD(high.parameters(), lr=0.1)
for xb, yb in batches(8):
    opt.zero_grad(); F.cross_entropy(high(low(xb).relu()), yb).backward()
    nn.utils.clip_grad_norm_(low.parameters(), 1.0); opt.step(); mine.step()
""",
    ),
    (
        "param-not-in-optimizer",
        """
maker, look = nn.Linear(6, 6), nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))
look.load_state_dict({k: v.clone() for k, v in look.state_dict().items()})
opt = Adam(maker.parameters(), lr=0.01)
for xb, _ in batches(8):
    opt.zero_grad(); F.mse_loss(look(maker(xb)), look(xb)).backward(); opt.step()
""",
    ),
    (
        "unregistered-submodule",
        """
class Deep(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 6) for _ in range(2)])
        self.out = nn.Linear(6, 3)
    def forward(self, v):
        for layer in self.layers: v = layer(v).relu()
        return self.out(v)
deep = Deep()
train(SGD(deep.parameters(), lr=0.1), loss=lambda xb, yb: F.cross_entropy(deep(xb), yb))
""",
    ),
    (
        "unregistered-submodule",
        """
class Borrowing(nn.Module):
    def __init__(self, other):
        super().__init__()
        self.other, self.out = [other], nn.Linear(3, 3)
    def forward(self, v): return self.out(self.other[0](v))
top = Borrowing(model)
opt = SGD([*top.parameters(), *model.parameters()], lr=0.1)
train(opt, loss=lambda xb, yb: F.cross_entropy(top(xb), yb))
""",
    ),
    (
        "optimizer-stale-params",
        """
opt = SGD(net.parameters(), lr=0.1)
train(opt, 4)
best = copy.deepcopy(net.state_dict())
net.load_state_dict(best)
train(opt, 12)
""",
    ),
    (
        "optimizer-stale-params",
        """
train(SGD(net.parameters(), lr=0.1), 4)
net = copy.deepcopy(net)
train(SGD(net.parameters(), lr=0.1), 12)
""",
    ),
    (
        "optimizer-never-stepped",
        """
one, two = SGD(net.parameters(), lr=0.1), Adam(net.parameters())
for i, b in enumerate(batches(20)):
    net.zero_grad(); both(*b).backward(); one.step()
""",
    ),
    (
        "optimizer-never-stepped",
        """
head, rest = SGD(net.head.parameters(), lr=0.1), SGD([*net.body.parameters(),
    *net.norm.parameters(), *net.aux.parameters(), net.shift], lr=0.1)
for i, b in enumerate(batches(20)):
    head.zero_grad(); both(*b).backward(); head.step()
    if i % 5 == 4: rest.step(); rest.zero_grad()
""",
    ),
    (
        "optimizer-never-stepped",
        """
one, cleaner = SGD(net.parameters(), lr=0.1), Adam(net.parameters())
for b in batches(20):
    cleaner.zero_grad(); both(*b).backward(); one.step()
""",
    ),
    (
        "optimizer-never-stepped",
        """
train(SGD(net.parameters(), lr=0.1))
opt = SGD(net.parameters(), lr=0.1)
for b in batches(20):
    opt.zero_grad(); both(*b).backward()
    for p in net.parameters(): p.data.sub_(p.grad, alpha=opt.param_groups[0]["lr"])
""",
    ),
    (
        "param-no-grad",
        """
net.aux.requires_grad_(False)
def loss(xb, yb): return F.cross_entropy(net(xb)[0], yb)
train(SGD([p for p in net.parameters() if p.requires_grad], lr=0.1), loss=loss)
""",
    ),
    (
        "param-no-grad",
        """
low = nn.ParameterList([nn.Parameter(torch.randn(6, 2)), nn.Parameter(torch.zeros(2, 3))])
def loss(xb, yb): return F.cross_entropy(xb @ low[0] @ low[1], yb)
train(SGD(low.parameters(), lr=0.1), loss=loss)
""",
    ),
    (
        "param-frozen-by-mistake",
        """
fresh = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 3))
fresh[0].requires_grad_(False)
train(SGD(fresh[2].parameters(), lr=0.1), loss=lambda a, b: F.cross_entropy(fresh(a), b))
""",
    ),
    (
        "param-frozen-by-mistake",
        """
fresh = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 3))
fresh.load_state_dict(copy.deepcopy(fresh.state_dict()))
fresh[2].requires_grad_(False)
train(SGD(fresh[0].parameters(), lr=0.1), loss=lambda a, b: F.cross_entropy(fresh(a), b))
""",
    ),
    (
        "tied-weights-broken",
        """
class LM(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb, self.out = nn.Embedding(9, 8), nn.Linear(8, 9)
        nn.init.normal_(self.emb.weight, std=0.1)
        self.out.weight = self.emb.weight
    def forward(self, ids): return self.out(self.emb(ids))
lm = LM(); ids = torch.arange(9)
train(SGD(lm.parameters(), lr=0.1), loss=lambda a, b: F.cross_entropy(lm(ids), ids.flip(0)))
""",
    ),
    (
        "tied-weights-broken",
        """
one = nn.Linear(6, 6)
clones = nn.Sequential(one, nn.ReLU(), copy.deepcopy(one), nn.ReLU(), nn.Linear(6, 3))
train(SGD(clones.parameters(), lr=0.1), loss=lambda a, b: F.cross_entropy(clones(a), b))
""",
    ),
    (
        "low-precision-update-lost",
        """
half = nn.Linear(6, 3).bfloat16()
train(SGD(half.parameters(), lr=0.5),
    loss=lambda a, b: F.cross_entropy(half(a.bfloat16()).float(), b))
""",
    ),
    ("low-precision-update-lost", "train(Adam(net.parameters(), lr=1e-6))"),
]


@pytest.mark.parametrize(("slug", "source"), BUGS)
def test_bug_is_found(tmp_path: Path, slug: str, source: str) -> None:
    check_bug(tmp_path, slug, COVER + source)


@pytest.mark.parametrize(("slug", "source"), CLEAN)
def test_near_miss_is_quiet(tmp_path: Path, slug: str, source: str) -> None:
    check_clean(tmp_path, slug, COVER + source)
