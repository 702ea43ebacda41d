"""Gradient accumulation with a short last window, a cosine per update and AdamW."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

EPOCHS, ACCUMULATION, BATCH = 4, 4, 8


def build_model():
    return nn.Sequential(
        nn.Linear(12, 32), nn.LayerNorm(32), nn.Tanh(), nn.Dropout(0.1), nn.Linear(32, 5)
    )


def build_loaders():
    inputs = torch.randn(176, 12)
    labels = (inputs[:, :5] + 0.3 * torch.randn(176, 5)).argmax(-1)
    training = TensorDataset(inputs[:144], labels[:144])
    testing = TensorDataset(inputs[144:], labels[144:])
    return DataLoader(training, BATCH, shuffle=True), DataLoader(testing, BATCH)


def evaluate(model, loader, criterion):
    model.eval()
    losses = []
    with torch.no_grad():
        for batch, labels in loader:
            losses.append(criterion(model(batch), labels).item())
    model.train()
    return sum(losses) / len(losses)


def train():
    torch.manual_seed(2)
    training_loader, testing_loader = build_loaders()
    model = build_model()
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, weight_decay=0.0)
    num_batches = len(training_loader)
    updates_per_epoch = -(-num_batches // ACCUMULATION)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(
        optimizer, T_max=EPOCHS * updates_per_epoch
    )
    running, tests = [], []
    for _epoch in range(EPOCHS):
        optimizer.zero_grad()
        for index, (batch, labels) in enumerate(training_loader):
            first_of_window = index // ACCUMULATION * ACCUMULATION
            window = min(ACCUMULATION, num_batches - first_of_window)
            loss = criterion(model(batch), labels) / window
            loss.backward()
            running.append(loss.item() * window)
            if (index + 1) % ACCUMULATION == 0 or index + 1 == num_batches:
                nn.utils.clip_grad_norm_(model.parameters(), 0.8)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        tests.append(evaluate(model, testing_loader, criterion))
    return model, running, tests


model, running, tests = train()
outcome = {"weights": model.state_dict(), "running": running, "tests": tests}
