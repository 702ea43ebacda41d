"""Trains, saves a checkpoint, builds everything anew, loads it and goes on."""

import os
import tempfile

import torch
import torch.nn.functional as F
from torch import nn

EPOCHS, STOP_AT = 6, 3
generator = torch.Generator().manual_seed(6)
inputs = torch.randn(80, 7, generator=generator)
targets = (inputs @ torch.randn(7, 3, generator=generator)).argmax(1)


def build():
    model = nn.Sequential(nn.Linear(7, 20), nn.GELU(), nn.Linear(20, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.9)
    return model, optimizer, scheduler


def save(path, model, optimizer, scheduler, epoch):
    checkpoint = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scheduler": scheduler.state_dict(),
        "random": torch.get_rng_state(),
        "epoch": epoch,
    }
    torch.save(checkpoint, path)


def load(path, model, optimizer, scheduler):
    checkpoint = torch.load(path)
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    scheduler.load_state_dict(checkpoint["scheduler"])
    torch.set_rng_state(checkpoint["random"])
    return checkpoint["epoch"]


def train(path, first_epoch, last_epoch, model, optimizer, scheduler):
    for epoch in range(first_epoch, last_epoch):
        for rows in torch.randperm(len(inputs)).split(10):
            loss = F.cross_entropy(model(inputs[rows]), targets[rows])
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
        scheduler.step()
        save(path, model, optimizer, scheduler, epoch + 1)


def main():
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "last.pt")
        train(path, 0, STOP_AT, *build())
        model, optimizer, scheduler = build()
        start = load(path, model, optimizer, scheduler)
        train(path, start, EPOCHS, model, optimizer, scheduler)
    return {"weights": model.state_dict(), "rates": scheduler.get_last_lr()}


if __name__ == "__main__":
    outcome = main()
