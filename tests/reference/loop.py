"""The naive loop: what Surefoot's update must equal, bit for bit. Read it in a minute.

Plain PyTorch, no Surefoot. A window is a list of batches; `weight(batch)` counts the items whose
losses `loss_sum(model, batch)` adds up.
"""

from __future__ import annotations

import torch


def accumulate(model, window, loss_sum, weight):
    """Leaves in `.grad` the gradient of the mean loss over all items of the window."""
    denominator = float(sum(weight(batch) for batch in window))
    total = 0.0
    for batch in window:
        loss = loss_sum(model, batch) / denominator
        loss.backward()
        total = total + loss.detach()
    return total


def train(model, windows, loss_sum, weight, optimizer, schedule, max_norm):
    """One update per window; returns the losses and gradient norms."""
    peaks = [group["lr"] for group in optimizer.param_groups]
    losses, norms = [], []
    model.train()
    for n, window in enumerate(windows):
        optimizer.zero_grad(set_to_none=True)
        losses.append(float(accumulate(model, window, loss_sum, weight)))
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)))
        for group, peak in zip(optimizer.param_groups, peaks, strict=True):
            group["lr"] = peak * schedule(n)
        optimizer.step()
    return losses, norms
