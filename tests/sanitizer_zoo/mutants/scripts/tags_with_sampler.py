"""Several tags a sample: pinned word vectors, rates by layer, one rank's share of a sampler."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

PINNED = 20


class Tagger(nn.Module):
    def __init__(self, num_tags):
        super().__init__()
        self.embed = nn.EmbeddingBag(60, 16, mode="mean")
        self.norm = nn.LayerNorm(16)
        self.hidden = nn.Linear(16, 24)
        self.tags = nn.Linear(24, num_tags)

    def forward(self, words):
        x = F.relu(self.hidden(self.norm(self.embed(words))))
        return self.tags(x)


def warm_then_linear(total, warm):
    def factor(step):
        if step < warm:
            return (step + 1) / warm
        return (total - step) / (total - warm)

    return factor


def main():
    torch.manual_seed(55)
    words = torch.randint(0, 60, (192, 6))
    wanted = torch.stack([(words % 7 == tag).any(1) for tag in range(5)], dim=1).float()
    dataset = TensorDataset(words, wanted)
    sampler = DistributedSampler(dataset, num_replicas=2, rank=0, shuffle=True, seed=1)
    loader = DataLoader(dataset, batch_size=12, sampler=sampler)
    model = Tagger(5)
    learnable_rows = (torch.arange(60) >= PINNED).float().unsqueeze(1)
    model.embed.weight.register_hook(lambda gradient: gradient * learnable_rows)
    optimizer = torch.optim.AdamW(
        [
            {"params": model.embed.parameters(), "lr": 1e-2, "weight_decay": 0.0},
            {"params": model.norm.parameters(), "lr": 5e-3, "weight_decay": 0.0},
            {"params": [model.hidden.weight, model.tags.weight], "lr": 5e-3},
            {"params": [model.hidden.bias, model.tags.bias], "weight_decay": 0.0},
        ],
        lr=5e-3,
        weight_decay=0.01,
    )
    epochs = 4
    total = epochs * len(loader)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, warm_then_linear(total, 6))
    losses = []
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for batch, tags in loader:
            scores = model(batch)
            probabilities = torch.sigmoid(scores)
            loss = F.binary_cross_entropy(probabilities, tags)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            losses.append(loss.item())
    return {"weights": model.state_dict(), "losses": losses}


if __name__ == "__main__":
    outcome = main()
