"""How a window is cut into micro-batches does not change its gradient."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch
from torch import Tensor

from surefoot.data.batch import MicroBatch
from surefoot.data.order import Cursor
from surefoot.engine.passes import PlainPass
from surefoot.engine.window import gather_window
from surefoot.models.gpt import GPT, GPTConfig
from surefoot.numerics.loss_scaling import NoLossScale
from surefoot.numerics.precision import choose_precision
from surefoot.tasks.generation import GenerationTask

VOCABULARY = 23
LONGEST = 17
NUM_SEQUENCES = 20


def sequences() -> list[Tensor]:
    """Twenty sequences of 3 to 17 tokens."""
    generator = torch.Generator().manual_seed(3)
    lengths = [3 + (7 * n) % (LONGEST - 2) for n in range(NUM_SEQUENCES)]
    return [torch.randint(VOCABULARY, (length,), generator=generator) for length in lengths]


def padded(chosen: list[Tensor]) -> dict[str, Tensor]:
    ids = torch.zeros(len(chosen), LONGEST, dtype=torch.int64)
    labels = torch.full_like(ids, -100)
    for row, sequence in enumerate(chosen):
        ids[row, : len(sequence)] = sequence
        labels[row, : len(sequence)] = sequence
    return {"input_ids": ids, "labels": labels}


def splits() -> list[list[list[int]]]:
    """Ten ways to cut twenty sequences into micro-batches, order and sizes included."""
    chooser = random.Random(0)
    ways = [[list(range(NUM_SEQUENCES))], [[n] for n in range(NUM_SEQUENCES)]]
    while len(ways) < 10:
        order = chooser.sample(range(NUM_SEQUENCES), NUM_SEQUENCES)
        cuts = sorted(chooser.sample(range(1, NUM_SEQUENCES), chooser.randint(1, 8)))
        borders = [0, *cuts, NUM_SEQUENCES]
        ways.append([order[a:b] for a, b in itertools.pairwise(borders)])
    return ways


def gradient(split: list[list[int]], dtype: torch.dtype) -> Tensor:
    torch.manual_seed(0)
    config = GPTConfig.llama(
        vocabulary_size=VOCABULARY,
        sequence_length=LONGEST,
        num_layers=2,
        num_heads=2,
        num_kv_heads=1,
        embedding_dim=16,
        feedforward_dim=32,
    )
    model = GPT(config).to(dtype)
    task = GenerationTask(VOCABULARY)
    every = sequences()

    def micro_batch(chosen: list[int]) -> MicroBatch:
        batch: Any = padded([every[n] for n in chosen])
        return MicroBatch(
            batch, {"loss": task.weight(batch)}, len(chosen), tuple(chosen), Cursor(), False
        )

    window = gather_window([micro_batch(chosen) for chosen in split])
    run = PlainPass(model, task, choose_precision("fp32", "cpu"))
    run(window.micro_batches, window.weights, NoLossScale())
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@pytest.mark.parametrize("way", range(1, 10))
@pytest.mark.parametrize(
    ("dtype", "bound"), [(torch.float64, 1e-12), (torch.float32, 1e-5)], ids=["fp64", "fp32"]
)
def test_any_split_gives_the_same_gradient(way: int, dtype: torch.dtype, bound: float) -> None:
    whole = gradient(splits()[0], dtype)
    other = gradient(splits()[way], dtype)
    assert float((other - whole).norm() / whole.norm()) <= bound


def test_dividing_by_the_number_of_micro_batches_would_be_wrong() -> None:
    """The check can fail: the usual `loss / k` is far off for unequal sequences."""
    split = [[n] for n in range(NUM_SEQUENCES)]
    whole = gradient(splits()[0], torch.float64)
    by_count = torch.stack([gradient([one], torch.float64) for one in split]).mean(dim=0)
    assert float((by_count - whole).norm() / whole.norm()) > 1e-2
