"""Plain functions, epochs, a schedule per epoch, clipping, a held-out part and early stopping."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(17)

NUM_TRAINING = 96
features = torch.randn(128, 10)
classes = (features @ torch.randn(10, 4)).argmax(dim=1)
training = TensorDataset(features[:NUM_TRAINING], classes[:NUM_TRAINING])
validation = TensorDataset(features[NUM_TRAINING:], classes[NUM_TRAINING:])
training_batches = DataLoader(training, batch_size=12, shuffle=True)
validation_batches = DataLoader(validation, batch_size=16, shuffle=False)

model = nn.Sequential(nn.Linear(10, 24), nn.ReLU(), nn.Dropout(0.2), nn.Linear(24, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)


def train_one_epoch():
    model.train()
    total = 0.0
    for inputs, targets in training_batches:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        total += loss.item() * len(inputs)
    return total / NUM_TRAINING


def validate():
    model.eval()
    correct, loss_sum = 0, 0.0
    with torch.no_grad():
        for inputs, targets in validation_batches:
            logits = model(inputs)
            loss_sum += F.cross_entropy(logits, targets, reduction="sum").item()
            correct += (logits.argmax(dim=1) == targets).sum().item()
    return loss_sum / len(validation), correct / len(validation)


history = []
best, patience = float("inf"), 3
for _epoch in range(6):
    training_loss = train_one_epoch()
    validation_loss, accuracy = validate()
    schedule.step()
    history.append((training_loss, validation_loss, accuracy))
    if validation_loss < best:
        best, patience = validation_loss, 3
    else:
        patience -= 1
    if patience == 0:
        break

outcome = {"weights": model.state_dict(), "history": history}
