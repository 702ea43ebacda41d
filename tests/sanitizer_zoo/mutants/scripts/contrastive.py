"""Two views of each sample, a momentum encoder for the keys, a queue; then a linear probe."""

import copy

import torch
import torch.nn.functional as F
from torch import nn

TEMPERATURE, MOMENTUM, QUEUE = 0.2, 0.9, 48


def encoder():
    return nn.Sequential(nn.Linear(14, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 8))


def view(x):
    return x + 0.2 * torch.randn_like(x)


@torch.no_grad()
def follow(target, model):
    for kept, new in zip(target.parameters(), model.parameters(), strict=True):
        kept.lerp_(new, 1 - MOMENTUM)


def embed(query, keys, data, epochs=3):
    optimizer = torch.optim.SGD(query.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.8)
    queue = F.normalize(torch.randn(QUEUE, 8), dim=1)
    history = []
    for _ in range(epochs):
        query.train()
        for rows in torch.randperm(len(data)).split(16):
            q = F.normalize(query(view(data[rows])), dim=1)
            with torch.no_grad():
                k = F.normalize(keys(view(data[rows])), dim=1)
            positive = (q * k).sum(1, keepdim=True)
            logits = torch.cat([positive, q @ queue.T], dim=1) / TEMPERATURE
            loss = F.cross_entropy(logits, torch.zeros(len(rows), dtype=torch.long))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            follow(keys, query)
            queue = torch.cat([k, queue])[:QUEUE]
            history.append(loss.item())
        schedule.step()
    return history


def probe(query, data, labels, epochs=4):
    query.requires_grad_(False)
    query.eval()
    classifier = nn.Linear(8, 3)
    optimizer = torch.optim.Adam(classifier.parameters(), lr=2e-2)
    for _ in range(epochs):
        for rows in torch.randperm(96).split(16):
            loss = F.cross_entropy(classifier(query(data[rows])), labels[rows])
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(classifier.parameters(), 0.4)
            optimizer.step()
    with torch.no_grad():
        hits = classifier(query(data[96:])).argmax(1) == labels[96:]
    return classifier, hits.float().mean().item()


def main():
    torch.manual_seed(37)
    labels = torch.randint(0, 3, (144,))
    data = torch.randn(3, 14)[labels] + 0.8 * torch.randn(144, 14)
    query = encoder()
    keys = copy.deepcopy(query)
    history = embed(query, keys, data[:96])
    classifier, accuracy = probe(query, data, labels)
    weights = {"query": query.state_dict(), "classifier": classifier.state_dict()}
    return {"weights": weights, "history": history, "accuracy": accuracy}


if __name__ == "__main__":
    outcome = main()
