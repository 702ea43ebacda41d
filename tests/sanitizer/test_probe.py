"""The probe leaves torch and the numbers of the script as they were."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.optim import Optimizer, lr_scheduler
from torch.utils.data import DataLoader, TensorDataset

from surefoot.sanitizer.session import Audit


def train(seed: int = 0, updates: int = 12) -> tuple[list[float], list[torch.Tensor], object]:
    """A loop that touches most of what is patched."""
    torch.manual_seed(seed)
    random.seed(seed)
    model = nn.Sequential(
        nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 3)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = lr_scheduler.CosineAnnealingLR(optimizer, T_max=updates)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    x = torch.randn(64, 6)
    loader = DataLoader(TensorDataset(x, (x @ torch.randn(6, 3)).argmax(1)), 8, shuffle=True)
    losses: list[float] = []
    while len(losses) < updates:
        for inputs, labels in loader:
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(inputs), labels)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            schedule.step()
            losses.append(loss.item())
    state = torch.get_rng_state(), random.getstate()
    return losses, [p.detach().clone() for p in model.parameters()], state


def test_losses_weights_and_random_streams_are_bit_equal() -> None:
    plain_losses, plain_weights, plain_state = train()
    with Audit() as audit:
        losses, weights, state = train()
    assert audit.trace.internal_errors == []
    assert audit.trace.updates == len(losses)
    assert losses == plain_losses
    assert all(torch.equal(a, b) for a, b in zip(weights, plain_weights, strict=True))
    assert torch.equal(state[0], plain_state[0])  # type: ignore[index]
    assert state[1] == plain_state[1]  # type: ignore[index]


PATCHED = [
    (Optimizer, "__init__"),
    (Optimizer, "zero_grad"),
    (nn.Module, "__call__"),
    (nn.Module, "train"),
    (functional, "cross_entropy"),
    (torch.autograd, "backward"),
    (nn.utils, "clip_grad_norm_"),
    (torch, "save"),
    (torch, "manual_seed"),
    (random, "seed"),
    (DataLoader, "__iter__"),
    (lr_scheduler.LRScheduler, "step"),
]


@pytest.mark.parametrize(("owner", "name"), PATCHED)
def test_everything_is_put_back(owner: object, name: str) -> None:
    before = vars(owner)[name]
    with pytest.raises(ZeroDivisionError), Audit():
        assert vars(owner)[name] is not before
        raise ZeroDivisionError
    assert vars(owner)[name] is before


def test_nothing_outlives_the_loop_because_of_the_audit() -> None:
    import gc
    import weakref

    with Audit():
        model = nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loss = model(torch.randn(4, 3)).mean()
        loss.backward()
        optimizer.step()
        kept = [weakref.ref(thing) for thing in (model, model.weight, optimizer, loss)]
        del model, optimizer, loss
        gc.collect()
        assert [ref() for ref in kept] == [None] * 4


def test_an_error_in_a_rule_does_not_reach_the_script() -> None:
    with Audit() as audit:
        for listeners in audit.trace._listeners.values():
            listeners.insert(0, broken)
        losses, _, _ = train()
    assert losses == train()[0]
    assert any("broken" in error for error in audit.trace.internal_errors)


def broken(event: object) -> None:
    raise RuntimeError("a rule with a mistake")
