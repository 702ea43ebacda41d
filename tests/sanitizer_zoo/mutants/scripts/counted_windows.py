"""Summed losses over windows of micro-batches, divided by the samples seen before each update."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

WINDOW = 3


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.value = nn.Linear(10, 16)
        self.gate = nn.Linear(10, 16)
        self.norm = nn.BatchNorm1d(16)
        self.out = nn.Linear(16, 4)

    def forward(self, x):
        return self.out(self.norm(self.value(x) * torch.sigmoid(self.gate(x))))


class Loop:
    def __init__(self, model, loader):
        self.model, self.loader = model, loader
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
        self.schedule = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, milestones=[2, 3])
        self.seen = 0
        self.losses = []

    def update(self):
        for parameter in self.model.parameters():
            parameter.grad.div_(self.seen)
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.seen = 0

    def epoch(self):
        self.model.train()
        total = 0.0
        for index, (x, y) in enumerate(self.loader, start=1):
            loss = F.cross_entropy(self.model(x), y, reduction="sum")
            loss.backward()
            self.seen += len(x)
            total += loss.item()
            if index % WINDOW == 0:
                self.update()
        if len(self.loader) % WINDOW != 0:
            self.update()
        self.schedule.step()
        self.losses.append(total / len(self.loader.dataset))

    def test(self, x, y):
        self.model.eval()
        with torch.no_grad():
            return (self.model(x).argmax(1) == y).float().mean().item()


def main():
    torch.manual_seed(29)
    x = torch.randn(172, 10)
    y = (x[:, :4] - x[:, 4:8]).argmax(1)
    loader = DataLoader(TensorDataset(x[:132], y[:132]), batch_size=12, shuffle=True)
    loop = Loop(Gated(), loader)
    tests = []
    for _ in range(4):
        loop.epoch()
        tests.append(loop.test(x[132:], y[132:]))
    return {"weights": loop.model.state_dict(), "losses": loop.losses, "tests": tests}


if __name__ == "__main__":
    outcome = main()
