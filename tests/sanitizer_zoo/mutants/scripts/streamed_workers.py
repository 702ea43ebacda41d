"""A stream divided among loader workers; a regression with a Huber loss."""

import itertools

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, get_worker_info


class Readings(IterableDataset):
    def __init__(self, count):
        self.count = count

    def __iter__(self):
        info = get_worker_info()
        records = range(self.count)
        if info is not None:
            records = itertools.islice(records, info.id, None, info.num_workers)
        for record in records:
            source = torch.Generator().manual_seed(1000 + record)
            reading = torch.randn(6, generator=source)
            yield reading, (reading * torch.arange(6)).sum().tanh()


class Regressor(nn.Module):
    def __init__(self):
        super().__init__()
        self.hidden = nn.ModuleList([nn.Linear(6, 16), nn.Linear(16, 16)])
        self.last = nn.Linear(16, 1)

    def forward(self, x):
        for layer in self.hidden:
            x = torch.relu(layer(x))
        return self.last(x).squeeze(-1)


torch.manual_seed(4)
loader = DataLoader(Readings(96), batch_size=8, num_workers=2)
model = Regressor()
criterion = nn.SmoothL1Loss()
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
losses = []
for _ in range(2):
    for x, y in loader:
        prediction = model(x)
        loss = criterion(prediction, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())

outcome = {"weights": model.state_dict(), "losses": losses}
