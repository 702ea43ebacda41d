"""A loop of Accelerate as its documentation has it; `bug` on the command line plants one."""

import sys

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

BUG = "bug" in sys.argv


def main() -> None:
    torch.set_num_threads(1)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    torch.manual_seed(0)
    x = torch.randn(256, 8)
    y = (x @ torch.randn(8, 3)).argmax(1)
    train = DataLoader(TensorDataset(x[:192], y[:192]), batch_size=16, shuffle=True)
    val = DataLoader(TensorDataset(x[192:], y[192:]), batch_size=32)
    model = torch.nn.Sequential(
        torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Dropout(0.1), torch.nn.Linear(16, 3)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=24)
    model, optimizer, train, val, scheduler = accelerator.prepare(
        model, optimizer, train, val, scheduler
    )
    for epoch in range(4):
        model.train()
        for inputs, targets in train:
            with accelerator.accumulate(model):
                loss = F.cross_entropy(model(inputs), targets)
                accelerator.backward(loss)
                if accelerator.sync_gradients and not BUG:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                if accelerator.sync_gradients and BUG:
                    accelerator.clip_grad_norm_(model.parameters(), 0.01)  # the bug
                scheduler.step()
                optimizer.zero_grad()
        model.eval()
        correct = 0
        for inputs, targets in val:
            with torch.no_grad():
                scores = model(inputs)
            scores, targets = accelerator.gather_for_metrics((scores, targets))
            correct += (scores.argmax(1) == targets).sum().item()
        accelerator.print(epoch, correct / 64)
    accelerator.end_training()


if __name__ == "__main__":
    main()
