"""Rare classes in a table: a weighted sampler, label smoothing, a plateau and early stopping."""

import copy

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

CLASSES, FEATURES, TRAIN_ROWS = 3, 10, 256


def make_datasets():
    labels = torch.multinomial(torch.tensor([0.7, 0.2, 0.1]), 456, replacement=True)
    centres = torch.randn(CLASSES, FEATURES)
    features = 5.0 + 3.0 * (centres[labels] + 1.3 * torch.randn(len(labels), FEATURES))
    known = features[:TRAIN_ROWS]
    features = (features - known.mean(dim=0)) / known.std(dim=0)
    train_set = TensorDataset(features[:TRAIN_ROWS], labels[:TRAIN_ROWS])
    return train_set, TensorDataset(features[TRAIN_ROWS:], labels[TRAIN_ROWS:])


def balanced_loader(dataset):
    labels = dataset.tensors[1]
    counts = torch.bincount(labels, minlength=CLASSES)
    sampler = WeightedRandomSampler(1.0 / counts[labels], num_samples=len(labels), replacement=True)
    return DataLoader(dataset, batch_size=32, sampler=sampler)


def build_model():
    return nn.Sequential(
        nn.Linear(FEATURES, 32, bias=False),
        nn.BatchNorm1d(32),
        nn.ReLU(),
        nn.Dropout(0.2),
        nn.Linear(32, CLASSES),
    )


@torch.no_grad()
def validate(model, loader):
    model.eval()
    logits = torch.cat([model(features) for features, _ in loader])
    labels = torch.cat([labels for _, labels in loader])
    losses = F.cross_entropy(logits, labels, reduction="none")
    hits = (logits.argmax(dim=1) == labels).float()
    balanced = [[part[labels == index].mean() for index in range(CLASSES)] for part in (losses, hits)]
    return torch.tensor(balanced).mean(dim=1).tolist()


def main():
    torch.manual_seed(19)
    train_set, val_set = make_datasets()
    train_loader, val_loader = balanced_loader(train_set), DataLoader(val_set, batch_size=50)
    model = build_model()
    criterion = nn.CrossEntropyLoss(label_smoothing=0.05)
    optimizer = torch.optim.AdamW(model.parameters(), lr=8e-3, weight_decay=1e-3)
    scheduler = ReduceLROnPlateau(optimizer, mode="min", factor=0.5, patience=1)
    history = {"train_loss": [], "val_loss": [], "val_recall": []}
    best_loss, best_state, waited = float("inf"), copy.deepcopy(model.state_dict()), 0
    for _ in range(7):
        model.train()
        total = 0.0
        for features, labels in train_loader:
            optimizer.zero_grad()
            loss = criterion(model(features), labels)
            loss.backward()
            optimizer.step()
            total += loss.item()
        val_loss, val_recall = validate(model, val_loader)
        scheduler.step(val_loss)
        history["train_loss"].append(total / len(train_loader))
        history["val_loss"].append(val_loss)
        history["val_recall"].append(val_recall)
        waited += 1
        if val_loss < best_loss:
            best_loss, best_state, waited = val_loss, copy.deepcopy(model.state_dict()), 0
        if waited == 3:
            break
    model.load_state_dict(best_state)
    return model, history


if __name__ == "__main__":
    model, history = main()
    train_curve, val_curve = history["train_loss"], history["val_loss"]
    print("train", [round(value, 3) for value in train_curve])
    print("validation", [round(value, 3) for value in val_curve], round(history["val_recall"][-1], 3))
    outcome = [model.state_dict(), train_curve, val_curve, history["val_recall"]]
