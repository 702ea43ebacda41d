"""A shared trunk with two tasks, two optimizers, a retained graph and an uncertainty weight."""

import torch
import torch.nn.functional as F
from torch import nn


class Trunk(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(9, 24), nn.Linear(24, 24)])

    def forward(self, x):
        for layer in self.layers:
            x = F.silu(layer(x))
        return x


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = Trunk()
        self.heads = nn.ModuleDict({"kind": nn.Linear(24, 3), "size": nn.Linear(24, 1)})
        self.log_scale = nn.Parameter(torch.zeros(()))

    def forward(self, x):
        hidden = self.trunk(x)
        return self.heads["kind"](hidden), self.heads["size"](hidden).squeeze(-1)


torch.manual_seed(41)
inputs = torch.randn(120, 9)
kinds = inputs[:, :3].argmax(1)
sizes = inputs[:, 3:].sum(1) / 3
model = Model()
head_parameters = list(model.heads["kind"].parameters()) + list(model.heads["size"].parameters())
trunk_optimizer = torch.optim.SGD(model.trunk.parameters(), lr=0.05, momentum=0.9)
head_optimizer = torch.optim.AdamW(head_parameters, lr=4e-3, weight_decay=0.0)
head_optimizer.add_param_group({"params": [model.log_scale], "lr": 1e-3})

history = []
for _epoch in range(4):
    order = torch.randperm(96)
    for rows in order.split(12):
        kind_logits, predicted_size = model(inputs[rows])
        kind_loss = F.cross_entropy(kind_logits, kinds[rows])
        distance = F.mse_loss(predicted_size, sizes[rows])
        size_loss = torch.exp(-model.log_scale) * distance + model.log_scale
        trunk_optimizer.zero_grad()
        head_optimizer.zero_grad()
        kind_loss.backward(retain_graph=True)
        size_loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 2.0)
        trunk_optimizer.step()
        head_optimizer.step()
    with torch.no_grad():
        kind_logits, predicted_size = model(inputs[96:])
        history.append(F.cross_entropy(kind_logits, kinds[96:]).item())
        history.append(F.mse_loss(predicted_size, sizes[96:]).item())

outcome = {"weights": model.state_dict(), "history": history}
