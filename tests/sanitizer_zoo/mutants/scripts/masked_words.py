"""Masked words: an encoder sees both sides, loss on the masked ones, accumulation, warm-up."""

import torch
import torch.nn.functional as F
from torch import nn

MASK, WORDS, LENGTH, WIDTH, ACCUMULATION = 0, 32, 12, 24, 2


class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.places = nn.Parameter(0.02 * torch.randn(LENGTH, WIDTH))
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 48, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(WIDTH)
        self.apply(self.start_small)

    def start_small(self, module):
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)

    def forward(self, ids):
        x = self.norm(self.encoder(self.words(ids) + self.places))
        return x @ self.words.weight.T


class Corpus:
    def __init__(self, seed):
        self.random = torch.Generator().manual_seed(seed)
        self.rule = torch.randperm(WORDS - 1) + 1

    def batch_of(self, size):
        ids = torch.randint(1, WORDS, (size, LENGTH), generator=self.random)
        ids[:, 1::2] = self.rule[ids[:, ::2] - 1]
        hidden = torch.rand(size, LENGTH, generator=self.random) < 0.2
        hidden[:, 0] = True
        labels = torch.where(hidden, ids, -100)
        return torch.where(hidden, MASK, ids), labels


def factor(step, warm=6, total=30):
    if step < warm:
        return (step + 1) / warm
    return max(0.05, (total - step) / (total - warm))


def main():
    torch.manual_seed(13)
    corpus, reader = Corpus(seed=3), Reader()
    decayed = [p for p in reader.parameters() if p.dim() > 1]
    exempt = [p for p in reader.parameters() if p.dim() <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.05}, {"params": exempt, "weight_decay": 0.0}],
        lr=4e-3,
    )
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    losses, accuracies = [], []
    for update in range(30):
        parts = [corpus.batch_of(10) for _ in range(ACCUMULATION)]
        num_masked = sum(int((labels != -100).sum()) for _, labels in parts)
        optimizer.zero_grad()
        for ids, labels in parts:
            loss = F.cross_entropy(
                reader(ids).transpose(1, 2), labels, ignore_index=-100, reduction="sum"
            )
            loss = loss / num_masked
            loss.backward()
            losses.append(loss.detach())
        nn.utils.clip_grad_norm_(reader.parameters(), 0.5)
        optimizer.step()
        scheduler.step()
        if update % 10 == 9:
            reader.eval()
            with torch.inference_mode():
                ids, labels = corpus.batch_of(32)
                right = reader(ids).argmax(-1) == labels
            accuracies.append(right[labels != -100].float().mean().item())
            reader.train()
    return {"weights": reader.state_dict(), "losses": losses, "accuracies": accuracies}


if __name__ == "__main__":
    outcome = main()
