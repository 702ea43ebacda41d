"""A small causal transformer on a stream of tokens: warm-up, cosine, tied weights, evaluation."""

import math

import torch
import torch.nn.functional as F
from torch import nn

VOCABULARY, LENGTH, WIDTH, HEADS = 48, 16, 32, 2
BATCH, NUM_UPDATES, WARMUP = 8, 40, 8


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm_1 = nn.LayerNorm(WIDTH)
        self.norm_2 = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def attend(self, x):
        batch, length, _ = x.shape
        parts = self.qkv(x).view(batch, length, 3, HEADS, WIDTH // HEADS)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, WIDTH))

    def forward(self, x):
        x = x + self.attend(self.norm_1(x))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight
        self.apply(self.initialize)

    @staticmethod
    def initialize(module):
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)

    def forward(self, ids):
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


torch.manual_seed(3)
jumps = torch.randint(0, VOCABULARY, (VOCABULARY, 3))
stream = [0]
for choice in torch.randint(0, 3, (3000,)).tolist():
    stream.append(jumps[stream[-1], choice].item())
stream = torch.tensor(stream)
training_stream, held_out_stream = stream[:2600], stream[2600:]


def batch_of(part, generator=None):
    starts = torch.randint(0, len(part) - LENGTH - 2, (BATCH,), generator=generator).tolist()
    inputs = torch.stack([part[i : i + LENGTH] for i in starts])
    targets = torch.stack([part[i + 1 : i + 1 + LENGTH] for i in starts])
    return inputs, targets


def rate(update):
    if update < WARMUP:
        return (update + 1) / WARMUP
    progress = (update - WARMUP) / (NUM_UPDATES - WARMUP)
    return 0.1 + 0.45 * (1 + math.cos(math.pi * progress))


model = Transformer()
decayed = [p for p in model.parameters() if p.ndim >= 2]
others = [p for p in model.parameters() if p.ndim < 2]
optimizer = torch.optim.AdamW(
    [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}],
    lr=3e-3,
    betas=(0.9, 0.95),
)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)


@torch.no_grad()
def evaluate():
    model.eval()
    generator = torch.Generator().manual_seed(9)
    losses = []
    for _ in range(3):
        inputs, targets = batch_of(held_out_stream, generator)
        logits = model(inputs)
        losses.append(F.cross_entropy(logits.flatten(0, 1), targets.flatten()))
    model.train()
    return torch.stack(losses).mean().item()


losses, evaluations = [], []
for update in range(NUM_UPDATES):
    inputs, targets = batch_of(training_stream)
    logits = model(inputs)
    loss = F.cross_entropy(logits.view(-1, VOCABULARY), targets.view(-1))
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    losses.append(loss.detach())
    if (update + 1) % 10 == 0:
        evaluations.append(evaluate())

outcome = {"weights": model.state_dict(), "losses": losses, "evaluations": evaluations}
