"""One-step forecasts of several series: an LSTM whose state runs on from chunk to chunk of the history."""

import os
import tempfile

import torch
from torch import nn

torch.manual_seed(41)
SERIES, LENGTH, TRAIN, CHUNK, STEPS, EVERY = 12, 260, 199, 22, 54, 9


class Forecaster(nn.Module):
    def __init__(self, width=24):
        super().__init__()
        self.lstm = nn.LSTM(1, width, batch_first=True)
        self.drop = nn.Dropout(0.1)
        self.head = nn.Linear(width, 1)

    def forward(self, values, state=None):
        states, state = self.lstm(values, state)
        return self.head(self.drop(states)), state


def make_series():
    time = torch.arange(LENGTH)
    period, phase = torch.randint(8, 17, (SERIES, 1)), 6.28 * torch.rand(SERIES, 1)
    daily = torch.sin(6.28 * time / period + phase)
    trend = 0.5 * torch.sin(6.28 * time / 70 + phase)
    return (20 + 4 * daily + 4 * trend + 0.4 * torch.randn(SERIES, LENGTH)).unsqueeze(-1)


def chunks(values):
    return zip(values[:, :-1].split(CHUNK, dim=1), values[:, 1:].split(CHUNK, dim=1), strict=True)


series = make_series()
mean, std = series[:, :TRAIN].mean(), series[:, :TRAIN].std()
series = (series - mean) / std
history = series[:, :TRAIN]
model = Forecaster()
criterion = nn.MSELoss()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=2e-2, total_steps=STEPS, pct_start=0.3)


@torch.inference_mode()
def validate():
    model.eval()
    forecasts, _ = model(series[:, :-1])
    model.train()
    return criterion(forecasts[:, TRAIN - 1 :], series[:, TRAIN:]).item()


with tempfile.TemporaryDirectory() as folder:
    best_path = os.path.join(folder, "best.pt")
    start_loss = best_loss = validate()
    torch.save({"model": model.state_dict(), "step": 0}, best_path)
    train_curve, val_curve = [], []
    step, running, stream, state = 0, 0.0, chunks(history), None
    while step < STEPS:
        try:
            inputs, targets = next(stream)
        except StopIteration:
            stream, state = chunks(history), None
            inputs, targets = next(stream)
        forecasts, state = model(inputs, state)
        state = tuple(part.detach() for part in state)
        loss = criterion(forecasts, targets)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        scheduler.step()
        running += loss.item()
        step += 1
        if step % EVERY == 0:
            train_curve.append(running / EVERY)
            running = 0.0
            val_curve.append(validate())
            if val_curve[-1] < best_loss:
                best_loss = val_curve[-1]
                torch.save({"model": model.state_dict(), "step": step}, best_path)
    best = torch.load(best_path, weights_only=True)

model.load_state_dict(best["model"])
final_loss = validate()
print("train", [round(value, 4) for value in train_curve])
print("validation", round(start_loss, 4), [round(value, 4) for value in val_curve])
print("kept step", best["step"], "validation", round(final_loss, 4))
outcome = [model.state_dict(), train_curve, val_curve, final_loss]
