"""Models and data that were not made for Surefoot: trained, resumed and loaded in twenty lines."""

from __future__ import annotations

from pathlib import Path

import pytest

from forked import run_forked

MAX_LINES = 20

TRANSFORMERS = """\
import torch
import surefoot
from transformers import BertConfig, BertForSequenceClassification

config = BertConfig(
    vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
    intermediate_size=32, max_position_embeddings=16, num_labels=3,
)
ids = torch.randint(3, 50, (320, 12))
data = [{"input_ids": row, "attention_mask": row > 0, "labels": row[0] % 3} for row in ids]
settings = {"train": {"horizon": "10 epochs", "micro_batch": 16}, "optimizer": {"lr": 5e-3}}
model = BertForSequenceClassification(config)
task = surefoot.ClassificationTask(3)
trainer = surefoot.Trainer(model, data[:256], task, validation=data[256:], settings=settings)
run = trainer.fit()
assert run.metrics["validation/accuracy"] > 0.9, run
loaded = surefoot.load(run.folder, model=BertForSequenceClassification(config))
assert torch.equal(loaded.model(ids).logits, run.model.eval()(ids).logits)
"""

OWN_KEYS = """\
import torch
import surefoot

class Houses(torch.utils.data.Dataset):
    def __init__(self, num_houses):
        self.features, self.city = torch.randn(num_houses, 6), torch.arange(num_houses) % 4
    def __len__(self):
        return len(self.city)
    def __getitem__(self, i):
        price = self.features[i].sum() + self.city[i]
        return {"features": self.features[i], "city": self.city[i], "price": price}

def loss_sum(model, batch):
    inputs = torch.cat([batch["features"], batch["city"][:, None]], dim=1)
    return (model(inputs)[:, 0] - batch["price"]).square().sum()

settings = {"train": {"horizon": "10 epochs", "micro_batch": 32}, "optimizer": {"lr": 0.05}}
args = (torch.nn.Linear(7, 1), Houses(256), loss_sum)
run = surefoot.Trainer(*args, validation=Houses(64), settings=settings).fit()
assert run.metrics["validation/loss"] < 0.5, run
"""

TUPLES = """\
import torch
import surefoot

class Reader(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn, self.head = torch.nn.GRU(5, 8, batch_first=True), torch.nn.Linear(8, 3)
    def forward(self, x):
        hidden, state = self.rnn(x)
        return self.head(hidden[:, -1]), state

x = torch.randn(256, 4, 5)
data, settings = (x, x[:, -1, :3].argmax(1)), {"optimizer": {"lr": 0.02}}
settings["train"] = {"horizon": "3 epochs", "micro_batch": 32}
task = surefoot.ClassificationTask(3)
half = surefoot.Trainer(Reader(), data, task, validation=data, settings=settings).fit()
settings["train"]["horizon"] = "10 epochs"
whole = surefoot.Trainer(Reader(), data, task, validation=data, settings=settings)
run = whole.fit(resume=half.folder, accept=["train.horizon"])
assert run.step == 80 and run.metrics["validation/accuracy"] > 0.8, run
"""


@pytest.mark.parametrize("script", [TRANSFORMERS, OWN_KEYS, TUPLES], ids=["bert", "keys", "tuples"])
def test_a_foreign_model_needs_few_lines(script: str, tmp_path: Path) -> None:
    if "transformers" in script:
        pytest.importorskip("transformers")
    assert len([line for line in script.splitlines() if line.strip()]) <= MAX_LINES
    program = tmp_path / "script.py"
    program.write_text(script, encoding="utf-8")
    code, printed = run_forked(program, folder=tmp_path, strict=True)
    assert code == 0, printed
