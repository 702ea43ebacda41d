"""Code that does odd things runs under the audit as it runs without: same numbers, no error."""

from __future__ import annotations

from pathlib import Path

import pytest

from surefoot.sanitizer.request import Request
from surefoot.sanitizer.run import run_here

START = """
import torch
from torch import nn
from torch.nn import functional as F
torch.manual_seed(0)
x, y = torch.randn(32, 6), torch.randint(0, 3, (32,))
def train(net, inputs=(x,), updates=6):
    opt = torch.optim.SGD(nn.Module.parameters(net), 0.1)
    for _ in range(updates):
        opt.zero_grad()
        loss = F.cross_entropy(net(*inputs), y)
        loss.backward()
        opt.step()
    return loss.item()
"""
SCRIPTS = {
    "parameters is a list": """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.vars = nn.ParameterList([torch.randn(3, 6), torch.zeros(3)])
    def forward(self, x): return F.linear(x, *self.vars)
    def parameters(self): return self.vars
print(train(Net()))
""",
    "parameters gives groups and wants an argument": """
class Net(nn.Linear):
    def parameters(self, rate): return [{"params": [self.weight, self.bias], "lr": rate}]
print(train(Net(6, 3)))
""",
    "alpha_dropout drops nothing unless it is told to": """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(6, 3)
    def forward(self, x): return F.alpha_dropout(self.fc(x), 0.5)
print(train(Net()), F.dropout(x, p=0.5, training=True).sum(), F.dropout(input=x).sum())
""",
    "sparse inputs of two layouts": """
class Graph(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(6, 3)
    def forward(self, adjacency, features): return adjacency @ self.fc(features)
dense = (torch.rand(32, 32) > 0.8).float()
print(train(Graph(), (dense.to_sparse(), x)), train(Graph(), (dense.to_sparse_csr(), x)))
""",
    "nested tensors and sparse gradients": """
class Bag(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(9, 3, sparse=True)
    def forward(self, rows): return torch.stack([self.emb(row).mean(0) for row in rows.unbind()])
rows = [torch.randint(0, 9, (1 + i % 4,)) for i in range(32)]
print(train(Bag(), (torch.nested.nested_tensor(rows, layout=torch.jagged),)))
""",
    "transforms of functions": """
from torch.func import functional_call, grad, vmap
net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8, track_running_stats=False), nn.Linear(8, 3))
weights = {k: v.detach() for k, v in net.named_parameters()}
def loss_of(weights, row, label):
    return F.cross_entropy(functional_call(net, weights, (row,)), label)
for _ in range(4):
    each = vmap(grad(loss_of), (None, 0, 0), randomness="different")(
        weights, x.view(4, 8, 6), y.view(4, 8))
    weights = {k: v - 0.1 * each[k].mean(0) for k, v in weights.items()}
print(sum(v.sum() for v in weights.values()).item())
""",
    "backward of an iterator and of an edge": """
net = nn.Linear(6, 3)
opt = torch.optim.SGD(net.parameters(), 0.1)
for _ in range(4):
    opt.zero_grad()
    out = net(x)
    torch.autograd.backward(loss for loss in (F.cross_entropy(out, y), out.square().mean()))
    edge = torch.autograd.graph.get_gradient_edge(net(x).sum())
    torch.autograd.backward(edge)
    opt.step()
print(net.weight.sum().item())
""",
    "a step that fails and is tried again": """
class Fails(torch.optim.SGD):
    calls = 0
    def step(self, closure=None):
        self.calls += 1
        if self.calls == 2: raise RuntimeError("out of memory")
        return super().step()
net = nn.Linear(6, 3)
opt = Fails(net.parameters(), 0.1)
for _ in range(6):
    opt.zero_grad()
    F.cross_entropy(input=net(x), target=y).backward()
    try: opt.step()
    except RuntimeError: opt.step()
print(net.weight.sum().item())
""",
    "BatchNorm by keyword and of something else": """
class Norm(nn.BatchNorm1d):
    def forward(self, inputs): return super().forward(inputs["x"])
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.fc = nn.BatchNorm1d(6), Norm(6), nn.Linear(6, 3)
    def forward(self, x): return self.fc(self.b({"x": self.a(input=x)}))
    def train(self, mode=True, loudly=False): return super().train(mode)
net = Net()
print(train(net.train(loudly=True)), train(net))
""",
    "a module that nothing may be asked": """
class Shy(nn.Linear):
    def __getattr__(self, name):
        if name.startswith("_surefoot"): raise ValueError(name)
        return super().__getattr__(name)
    def named_parameters(self, *args, **kwargs): raise NotImplementedError
    def state_dict(self, *args, **kwargs): raise NotImplementedError
net = Shy(6, 3)
opt = torch.optim.SGD([net.weight, net.bias], 0.1)
for _ in range(4):
    opt.zero_grad(); F.cross_entropy(net(x), y).backward(); opt.step()
print(net.weight.sum().item())
""",
}
MAY_FAIL_INSIDE = {"a module that nothing may be asked"}


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state")
@pytest.mark.parametrize("name", SCRIPTS)
def test_it_runs_as_without_the_audit(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "script.py"
    script.write_text(START + SCRIPTS[name])
    exec(compile(script.read_text(), str(script), "exec"), {"__name__": "__main__"})
    plain = capsys.readouterr().out
    summary, code = run_here(Request(str(script)), tmp_path)
    assert (code, capsys.readouterr().out) == (0, plain)
    if name not in MAY_FAIL_INSIDE:
        assert summary.internal_errors == [], "\n".join(summary.internal_errors)
        assert summary.updates or "transforms" in name


def test_where_the_audit_cannot_begin_the_script_runs_unwatched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from surefoot.sanitizer.probe import losses

    def fail(patches: object) -> None:
        raise AttributeError("torch has changed")

    monkeypatch.setattr(losses, "attach", fail)
    script = tmp_path / "script.py"
    script.write_text(START + "print(train(nn.Linear(6, 3)) > 0)")
    summary, code = run_here(Request(str(script)), tmp_path)
    assert (code, capsys.readouterr().out) == (0, "True\n")
    (error,) = summary.internal_errors
    assert error.startswith("attach: AttributeError: torch has changed\n")
