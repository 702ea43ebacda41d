"""Stochastic weight averaging with BatchNorm, SWALR, and an exponential average beside it."""

import copy

import torch
from torch import nn
from torch.optim.swa_utils import SWALR, AveragedModel, update_bn
from torch.utils.data import DataLoader, TensorDataset


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 20), nn.BatchNorm1d(20), nn.ReLU())
        self.head = nn.Linear(20, 3)

    def forward(self, x):
        return self.head(self.body(x))


class ExponentialAverage:
    def __init__(self, model, decay):
        self.decay = decay
        self.shadow = copy.deepcopy(model)
        self.shadow.requires_grad_(False)
        self.shadow.eval()

    @torch.no_grad()
    def update(self, model):
        for kept, new in zip(self.shadow.parameters(), model.parameters(), strict=True):
            kept.lerp_(new, 1 - self.decay)
        for kept, new in zip(self.shadow.buffers(), model.buffers(), strict=True):
            kept.copy_(new)


@torch.no_grad()
def score(model, loader):
    model.eval()
    values = [(model(x).argmax(1) == y).float().mean().item() for x, y in loader]
    return sum(values) / len(values)


def main(epochs=6, averaging_from=3):
    torch.manual_seed(23)
    x = torch.randn(120, 8) * torch.linspace(0.5, 3.0, 8)
    y = (x[:, :3] * x[:, 3:6]).argmax(1)
    train = DataLoader(TensorDataset(x[:96], y[:96]), batch_size=16, shuffle=True)
    test = DataLoader(TensorDataset(x[96:], y[96:]), batch_size=24)
    model = Net()
    averaged = AveragedModel(model)
    shadow = ExponentialAverage(model, decay=0.9)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, averaging_from, eta_min=0.01)
    constant = SWALR(optimizer, swa_lr=0.02, anneal_epochs=2)
    criterion = nn.CrossEntropyLoss()
    scores = []
    for epoch in range(epochs):
        model.train()
        for inputs, labels in train:
            optimizer.zero_grad()
            criterion(model(inputs), labels).backward()
            optimizer.step()
            shadow.update(model)
        if epoch < averaging_from:
            cosine.step()
        else:
            averaged.update_parameters(model)
            constant.step()
        scores.append(score(model, test))
    update_bn(train, averaged)
    scores += [score(averaged, test), score(shadow.shadow, test)]
    return {"weights": averaged.state_dict(), "shadow": shadow.shadow.state_dict(), "s": scores}


if __name__ == "__main__":
    outcome = main()
