"""A small causal transformer on strings of uneven length: accumulation over tokens, warm-up and cosine."""

import math
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

PAD, END, FIRST, LETTERS, LENGTH = 0, 1, 2, 14, 13


@dataclass
class Config:
    width: int = 32
    smoothing: float = 0.05
    lr: float = 8e-3
    accumulate: int = 3
    epochs: int = 7
    warm_up: int = 6


class CausalModel(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.words = nn.Embedding(FIRST + LETTERS, config.width, padding_idx=PAD)
        self.places = nn.Embedding(LENGTH, config.width)
        options = {"nhead": 4, "dim_feedforward": 64, "dropout": 0.1, "batch_first": True, "norm_first": True}
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(config.width, **options) for _ in range(2))
        self.scores = nn.Sequential(nn.LayerNorm(config.width), nn.Linear(config.width, FIRST + LETTERS))

    def forward(self, tokens):
        places = torch.arange(tokens.shape[1])
        states = self.words(tokens) + self.places(places)
        for block in self.blocks:
            states = block(states, src_mask=places > places[:, None], src_key_padding_mask=tokens == PAD)
        return self.scores(states)


def summed_loss(tokens, smoothing=0.0):
    logits, wanted = model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()
    return F.cross_entropy(logits, wanted, ignore_index=PAD, reduction="sum", label_smoothing=smoothing)


def count_tokens(batches):
    return sum((tokens[:, 1:] != PAD).sum().item() for tokens in batches)


torch.manual_seed(12)
config = Config()
choices = torch.cartesian_prod(torch.arange(LETTERS), torch.arange(1, 4), torch.arange(5, LENGTH))
starts, strides, lengths = choices[torch.randperm(len(choices))].T
bodies = [start + stride * torch.arange(length) for start, stride, length in zip(starts, strides, lengths, strict=True)]
strings = [F.pad(FIRST + body % LETTERS, (0, 1), value=END) for body in bodies]
pad = partial(pad_sequence, batch_first=True, padding_value=PAD)
train_loader = DataLoader(strings[:152], batch_size=8, shuffle=True, collate_fn=pad)
val_loader = DataLoader(strings[152:216], batch_size=32, collate_fn=pad)
model = CausalModel(config)
groups = [{"params": [weight for weight in model.parameters() if weight.ndim > 1], "weight_decay": 0.05}]
groups.append({"params": [weight for weight in model.parameters() if weight.ndim <= 1], "weight_decay": 0.0})
optimizer = torch.optim.AdamW(groups, lr=config.lr)
updates = config.epochs * math.ceil(len(train_loader) / config.accumulate)
scheduler = torch.optim.lr_scheduler.LambdaLR(
    optimizer, lambda update: min((update + 1) / config.warm_up, 0.5 + 0.5 * math.cos(math.pi * update / updates))
)

train_curve, val_curve = [], []
for _ in range(config.epochs):
    model.train()
    batches, total = list(train_loader), 0.0
    for first in range(0, len(batches), config.accumulate):
        window = batches[first : first + config.accumulate]
        optimizer.zero_grad()
        for tokens in window:
            loss = summed_loss(tokens, config.smoothing)
            (loss / count_tokens(window)).backward()
            total += loss.item()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
    train_curve.append(total / count_tokens(batches))
    model.eval()
    with torch.no_grad():
        val_curve.append(sum(summed_loss(tokens).item() for tokens in val_loader) / count_tokens(val_loader))

print("train", [round(value, 3) for value in train_curve])
print("validation", [round(value, 3) for value in val_curve])
outcome = [model.state_dict(), train_curve, val_curve]
