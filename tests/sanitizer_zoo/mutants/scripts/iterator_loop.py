"""A loop by updates over an endless iterator, polynomial schedule, periodic test, dtype stated."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(101)
TOTAL_UPDATES, TEST_EVERY = 48, 12
DTYPE = torch.float32


class Network(nn.Module):
    def __init__(self, probabilities=False):
        super().__init__()
        self.first = nn.Linear(14, 28)
        self.second = nn.Linear(28, 6)
        self.probabilities = probabilities

    def forward(self, x):
        x = F.dropout(F.elu(self.first(x)), p=0.2, training=self.training)
        x = self.second(x)
        return F.softmax(x, dim=-1) if self.probabilities else x


def endless(loader):
    while True:
        yield from loader


def test(network, dataset):
    network.eval()
    with torch.no_grad():
        x, y = dataset.tensors
        result = F.cross_entropy(network(x), y).item()
    network.train()
    return result


points = torch.randn(200, 14, dtype=DTYPE)
answers = (points[:, :6] * points[:, 6:12]).argmax(dim=1)
training_set = TensorDataset(points[:160], answers[:160])
test_set = TensorDataset(points[160:], answers[160:])
loader = DataLoader(training_set, batch_size=16, shuffle=True, drop_last=True)
iterator = endless(loader)

network = Network().to(DTYPE)
optimizer = torch.optim.AdamW(network.parameters(), lr=3e-4, betas=(0.9, 0.98), weight_decay=0)
scheduler = torch.optim.lr_scheduler.PolynomialLR(optimizer, total_iters=TOTAL_UPDATES, power=1.0)
running, tests = torch.zeros(()), []
network.train()
for update in range(1, TOTAL_UPDATES + 1):
    x, y = next(iterator)
    loss = F.cross_entropy(network(x), y)
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
    optimizer.step()
    scheduler.step()
    running = running + loss.detach()
    if update % TEST_EVERY == 0:
        tests.append((running.item(), test(network, test_set)))
        running = torch.zeros(())

outcome = {"weights": network.state_dict(), "tests": tests}
