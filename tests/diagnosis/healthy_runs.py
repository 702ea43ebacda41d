"""Runs with nothing wrong: models, optimizers, schedules, lengths and noise. It knows no rule."""

from __future__ import annotations

import torch
from torch import nn

from diagnosis.problems import PROBLEMS, Log, Setup, shuffled, train, warmup_cosine


def usual(setup: Setup) -> None:
    pass


def constant_rate(setup: Setup) -> None:
    setup.rate /= 2
    setup.schedule = lambda n, total: warmup_cosine(n, total, floor=1.0)


def with_momentum(setup: Setup) -> None:
    setup.rate = {"mlp": 0.05, "cnn": 0.02, "gpt": 0.5}[setup.name]
    setup.make_optimizer = lambda s: torch.optim.SGD(s.model.parameters(), lr=s.rate, momentum=0.9)


def small_batches(setup: Setup) -> None:
    setup.batch_size = 8
    setup.rate /= 2


def with_dropout(setup: Setup) -> None:
    setup.model = (
        nn.Sequential(nn.Dropout(0.1), setup.model) if not setup.is_language else setup.model
    )
    setup.rate *= 0.7


def long(setup: Setup) -> None:
    setup.updates *= 3


def unclipped(setup: Setup) -> None:
    setup.clip = None
    setup.logs_ids = False


def short(setup: Setup) -> None:
    setup.updates = 60
    setup.evaluate_every = 15


KINDS = {
    kind.__name__: kind
    for kind in (
        usual,
        constant_rate,
        with_momentum,
        small_batches,
        with_dropout,
        long,
        unclipped,
        short,
    )
}


def healthy(kind: str, problem: str, seed: int) -> Log:
    setup = PROBLEMS[problem](500 + seed)
    KINDS[kind](setup)
    return train(setup)


__all__ = ["KINDS", "healthy", "shuffled"]
