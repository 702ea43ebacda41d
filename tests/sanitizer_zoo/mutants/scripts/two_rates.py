"""Fine-tuning with a small rate for the old layers and a large one for the new head; best kept."""

import copy

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(64)


class Body(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(16, 32)
        self.norm = nn.BatchNorm1d(32)
        self.outer = nn.Linear(32, 16)

    def forward(self, x):
        return torch.tanh(self.outer(F.relu(self.norm(self.inner(x)))))


class Net(nn.Module):
    def __init__(self, body, num_outputs):
        super().__init__()
        self.body = body
        self.drop = nn.Dropout(0.2)
        self.head = nn.Linear(16, num_outputs)

    def forward(self, x):
        return self.head(self.drop(self.body(x)))


def pretrain(body, x, steps=24):
    restore = nn.Linear(16, 16)
    optimizer = torch.optim.Adam([*body.parameters(), *restore.parameters()], lr=3e-3)
    body.train()
    for _ in range(steps):
        rows = torch.randint(0, len(x), (24,))
        loss = F.mse_loss(restore(body(x[rows])), x[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def epoch_of(net, optimizer, x, y):
    net.train()
    mean = torch.zeros(())
    for rows in torch.randperm(len(x)).split(16):
        loss = F.binary_cross_entropy_with_logits(net(x[rows]).squeeze(1), y[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        mean += loss.detach() * len(rows) / len(x)
    return mean.item()


def validate(net, x, y):
    net.eval()
    with torch.no_grad():
        logits = net(x).squeeze(1)
        loss = F.binary_cross_entropy_with_logits(logits, y).item()
    return loss, ((logits > 0) == (y > 0.5)).float().mean().item()


everything = torch.randn(260, 16)
answers = (everything[:, :4].sum(1) * everything[:, 4] > 0).float()
train_x, train_y = everything[:176], answers[:176]
val_x, val_y = everything[176:], answers[176:]
body = Body()
pretrain(body, everything[:176])
net = Net(body, 1)
optimizer = torch.optim.AdamW(
    [
        {"params": net.body.parameters(), "lr": 5e-4},
        {"params": net.head.parameters(), "lr": 1e-2},
    ],
    weight_decay=0.0,
)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=6)
best, best_loss, log = None, float("inf"), []
for _ in range(6):
    train_loss = epoch_of(net, optimizer, train_x, train_y)
    val_loss, val_accuracy = validate(net, val_x, val_y)
    scheduler.step()
    log.append((train_loss, val_loss, val_accuracy))
    if val_loss < best_loss:
        best, best_loss = copy.deepcopy(net.state_dict()), val_loss

net.load_state_dict(best)
outcome = {"weights": net.state_dict(), "log": log, "final": validate(net, val_x, val_y)}
