"""Losses and labels: bugs of two styles each, and near-misses."""

from __future__ import annotations

from pathlib import Path

import pytest

from sanitizer_zoo.zoo import check_bug, check_clean

LOSSES = """
def train(loss, n=6, parameters=model.parameters()):
    opt = torch.optim.SGD(list(parameters), lr=0.05)
    for xb, yb in batches(n):
        opt.zero_grad(); loss(xb, yb).backward(); opt.step()
"""
WORDS = """
V, T = 13, 10
class LM(nn.Module):
    def __init__(self, causal=True, rnn=False, both=False):
        super().__init__()
        self.emb = nn.Embedding(V, 8); self.causal = causal
        layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
        self.mix = nn.GRU(8, 8, batch_first=True, bidirectional=both) if rnn else (
            nn.TransformerEncoder(layer, 1))
        self.out = nn.Linear(16 if both else 8, V)
    def forward(self, ids):
        h = self.emb(ids)
        if isinstance(self.mix, nn.GRU): return self.out(self.mix(h)[0])
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1])
        return self.out(self.mix(h, mask=mask if self.causal else None))
def words(n=4): return torch.randint(1, V, (n, T))
def train_lm(lm, loss, n=5):
    opt = torch.optim.SGD(lm.parameters(), lr=0.05)
    for _ in range(n):
        opt.zero_grad(); loss(lm, words()).backward(); opt.step()
def ce(logits, labels, **k): return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), **k)
"""

BUGS = [
    ("softmax-before-ce", "train(lambda xb, yb: F.cross_entropy(model(xb).softmax(1), yb))"),
    (
        "softmax-before-ce",
        """
net = nn.Sequential(*model, nn.Softmax(dim=-1)); crit = nn.CrossEntropyLoss()
train(lambda xb, yb: crit(net(xb), yb))
""",
    ),
    (
        "sigmoid-before-bcelogits",
        """
crit = nn.BCEWithLogitsLoss()
train(lambda xb, yb: crit(torch.sigmoid(model(xb)), F.one_hot(yb, 3).float()))
""",
    ),
    (
        "sigmoid-before-bcelogits",
        """
net = nn.Sequential(*model, nn.Sigmoid())
train(lambda xb, yb: F.binary_cross_entropy_with_logits(
    net(xb)[:, 0], (yb == 0).float()))
""",
    ),
    ("nll-on-logits", "train(lambda xb, yb: F.nll_loss(model(xb), yb))"),
    (
        "nll-on-logits",
        "crit = nn.NLLLoss()\ntrain(lambda xb, yb: crit(model(xb).softmax(1), yb))",
    ),
    (
        "kl-div-input-not-log",
        "train(lambda xb, yb: F.kl_div(model(xb).softmax(1), F.one_hot(yb, 3).float(),"
        " reduction='sum'))",
    ),
    (
        "kl-div-input-not-log",
        """
crit = nn.KLDivLoss(reduction="batchmean", log_target=True)
goal = torch.randn(8, 3).log_softmax(1)
train(lambda xb, yb: crit(model(xb), goal))
""",
    ),
    ("labels-not-shifted", "train_lm(LM(), lambda m, w: ce(m(w), w))"),
    (
        "labels-not-shifted",
        """
def loss(m, w): return F.cross_entropy(m(w).transpose(1, 2), w)
train_lm(LM(rnn=True), loss)
""",
    ),
    ("labels-double-shifted", "train_lm(LM(), lambda m, w: ce(m(w)[:, :-2], w[:, 2:]))"),
    (
        "labels-double-shifted",
        """
def loss(m, w):
    labels = torch.cat([w[:, 1:], torch.full((4, 1), -100)], 1)
    return F.cross_entropy(m(w)[:, :-1].transpose(1, 2), labels[:, 1:])
train_lm(LM(rnn=True), loss)
""",
    ),
    (
        "init-loss-off",
        "nn.init.normal_(model[2].weight, std=9.0)\n"
        "train(lambda xb, yb: F.cross_entropy(model(xb), yb))",
    ),
    (
        "init-loss-off",
        "crit = nn.CrossEntropyLoss()\ntrain(lambda xb, yb: crit(40 * model(xb), yb))",
    ),
    ("loss-broadcast", "train(lambda xb, yb: ((model(xb)[:, 0] - yb[:, None]) ** 2).mean())"),
    (
        "loss-broadcast",
        """
import warnings; warnings.simplefilter("ignore")
one = nn.Linear(6, 1)
train(lambda xb, yb: F.mse_loss(one(xb), yb.float()), parameters=one.parameters())
""",
    ),
    (
        "loss-includes-padding",
        """
def loss(m, w):
    for i in range(len(w)): w[i, 4 + i:] = 0
    return ce(m(w)[:, :-1], w[:, 1:])
train_lm(LM(), loss)
""",
    ),
    (
        "loss-includes-padding",
        """
from torch.nn.utils.rnn import pad_sequence
def loss(m, w):
    rows = pad_sequence([r[: 3 + 2 * i] for i, r in enumerate(w)], True, padding_value=12)
    return F.cross_entropy(m(rows[:, :-1]).transpose(1, 2), rows[:, 1:])
lm = LM(rnn=True); lm.emb = nn.Embedding(V, 8, padding_idx=12)
train_lm(lm, loss)
""",
    ),
    ("lm-not-causal", "train_lm(LM(causal=False), lambda m, w: ce(m(w[:, :-1]), w[:, 1:]))"),
    (
        "lm-not-causal",
        "train_lm(LM(rnn=True, both=True), lambda m, w: ce(m(w)[:, :-1], w[:, 1:]))",
    ),
]

CLEAN = [
    ("softmax-before-ce", "train(lambda xb, yb: F.cross_entropy(model(xb).log_softmax(1), yb))"),
    ("softmax-before-ce", "train(lambda xb, yb: F.cross_entropy(model(xb), yb))"),
    (
        "sigmoid-before-bcelogits",
        "train(lambda xb, yb: F.binary_cross_entropy_with_logits(model(xb),"
        " F.one_hot(yb, 3).float()))",
    ),
    (
        "sigmoid-before-bcelogits",
        "train(lambda xb, yb: F.binary_cross_entropy(model(xb).sigmoid(),"
        " F.one_hot(yb, 3).float()))",
    ),
    ("nll-on-logits", "train(lambda xb, yb: F.nll_loss(model(xb).log_softmax(1), yb))"),
    ("nll-on-logits", "train(lambda xb, yb: F.nll_loss((model(xb).softmax(1) + 1e-8).log(), yb))"),
    (
        "kl-div-input-not-log",
        "train(lambda xb, yb: F.kl_div(model(xb).log_softmax(1), F.one_hot(yb, 3).float(),"
        " reduction='batchmean'))",
    ),
    (
        "kl-div-input-not-log",
        "goal = torch.randn(8, 3).log_softmax(1)\n"
        "train(lambda xb, yb: F.kl_div(model(xb).log_softmax(1), goal, log_target=True,"
        " reduction='sum'))",
    ),
    ("labels-not-shifted", "train_lm(LM(), lambda m, w: ce(m(w)[:, :-1], w[:, 1:]))"),
    ("labels-not-shifted", "train_lm(LM(causal=False), lambda m, w: ce(m(w), w))"),
    ("labels-double-shifted", "train_lm(LM(), lambda m, w: ce(m(w[:, :-1]), w[:, 1:]))"),
    (
        "labels-double-shifted",
        """
def loss(m, w):
    out = m(w)
    return ce(out[:, :-1], w[:, 1:]) + 0.3 * ce(out[:, :-2], w[:, 2:])
train_lm(LM(), loss)
""",
    ),
    ("init-loss-off", "train(lambda xb, yb: F.cross_entropy(model(xb), yb))"),
    (
        "init-loss-off",
        "model.load_state_dict({k: 9 * v for k, v in model.state_dict().items()})\n"
        "train(lambda xb, yb: F.cross_entropy(model(xb), yb))",
    ),
    (
        "loss-broadcast",
        "train(lambda xb, yb: (model(xb)[:, 0].unsqueeze(1) - model(xb)[:, 0]).relu().mean())",
    ),
    ("loss-broadcast", "train(lambda xb, yb: F.mse_loss(model(xb)[:, 0], yb.float()))"),
    (
        "loss-includes-padding",
        """
def loss(m, w):
    for i in range(len(w)): w[i, 4 + i:] = 0
    return ce(m(w)[:, :-1], w[:, 1:], ignore_index=0)
train_lm(LM(), loss)
""",
    ),
    ("loss-includes-padding", "train_lm(LM(rnn=True), lambda m, w: ce(m(w)[:, :-1], w[:, 1:]))"),
    ("lm-not-causal", "train_lm(LM(), lambda m, w: ce(m(w[:, :-1]), w[:, 1:]))"),
    (
        "lm-not-causal",
        """
def loss(m, w):
    hidden = torch.rand(w.shape) < 0.2; hidden[:, 0] = True
    return ce(m(w.masked_fill(hidden, 0)), w.masked_fill(~hidden, -100))
train_lm(LM(causal=False), loss)
""",
    ),
]


@pytest.mark.parametrize(("slug", "source"), BUGS)
def test_bug_is_found(tmp_path: Path, slug: str, source: str) -> None:
    check_bug(tmp_path, slug, LOSSES + WORDS + source)


@pytest.mark.parametrize(("slug", "source"), CLEAN)
def test_near_miss_is_quiet(tmp_path: Path, slug: str, source: str) -> None:
    check_clean(tmp_path, slug, LOSSES + WORDS + source)
