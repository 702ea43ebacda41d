"""Tabular regression: standardised columns, one constant, missing values, a plateau schedule."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

EPSILON = 1e-6


def table(rows=160):
    columns = torch.randn(rows, 6) * torch.tensor([1.0, 10.0, 0.1, 5.0, 1.0, 0.0])
    answers = columns[:, 0] - 0.2 * columns[:, 1] + 4 * columns[:, 2] + 0.1 * torch.randn(rows)
    columns[::17, 3] = float("nan")
    return columns, answers


def prepare(columns):
    columns = columns.nan_to_num(0.0)
    mean, spread = columns.mean(dim=0), columns.std(dim=0)
    return (columns - mean) / (spread + EPSILON)


class Perceptron(nn.Module):
    def __init__(self, width=20):
        super().__init__()
        self.first = nn.Linear(6, width)
        self.second = nn.Linear(width, 1)

    def forward(self, x):
        return self.second(torch.relu(self.first(x))).squeeze(-1)


def run():
    torch.manual_seed(19)
    columns, answers = table()
    data = TensorDataset(prepare(columns), answers)
    train_part, test_part = random_split(data, [128, 32])
    train_batches = DataLoader(train_part, batch_size=16, shuffle=True)
    test_batches = DataLoader(test_part, batch_size=32)
    model = Perceptron()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-2)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=1, threshold=0.3)
    criterion = nn.MSELoss()
    report = []
    for epoch in range(7):
        epoch_loss = torch.zeros(())
        for x, y in train_batches:
            optimizer.zero_grad()
            loss = criterion(model(x), y)
            loss.backward()
            optimizer.step()
            epoch_loss += loss.detach()
        with torch.no_grad():
            test_loss = sum(criterion(model(x), y).item() for x, y in test_batches)
        plateau.step(test_loss)
        report.append((epoch, epoch_loss.item(), test_loss, optimizer.param_groups[0]["lr"]))
    return {"weights": model.state_dict(), "report": report}


if __name__ == "__main__":
    outcome = run()
