"""What one sample of a decoder costs, against torch's own count; what a run says of its data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from surefoot.assembly.loading import flops_per_sample
from surefoot.core.counting import Pace, updates_in
from surefoot.core.units import Flops
from surefoot.models.gpt import GPT, GPTConfig
from surefoot.observe.events import read_events
from surefoot.tasks.generation import GenerationTask
from surefoot.trainer import Trainer


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("positions", ["rope", "learned"])
def test_products_of_a_decoder_are_those_that_torch_counts(tied: bool, positions: Any) -> None:
    shape = GPTConfig(
        vocabulary_size=64, sequence_length=16, num_layers=2, num_heads=2, num_kv_heads=1,
        embedding_dim=32, feedforward_dim=48, tied=tied, positions=positions,
    )  # fmt: skip
    model = GPT(shape)
    with FlopCounterMode(display=False) as counter:
        logits = model(torch.zeros(1, 16, dtype=torch.long))
        logits.sum().backward()
    # Vectors of norms take part in no product, and torch does not see inside its CPU attention.
    vectors = sum(p.numel() for p in model.parameters() if p.ndim == 1)
    attention = 12 * 2 * 32 * 16 * 16
    expected = flops_per_sample(model)
    assert expected is not None
    assert expected - 6 * vectors * 16 - attention == pytest.approx(
        counter.get_total_flops(), rel=0.02
    )
    assert flops_per_sample(nn.Linear(2, 2)) is None


def test_a_horizon_in_operations() -> None:
    assert updates_in(Flops(1e6), Pace(10, num_samples=100, flops_per_sample=5e3)) == 20


def test_a_run_says_what_nobody_asks_for(tmp_path: Path) -> None:
    shape = GPTConfig.llama(
        vocabulary_size=16, sequence_length=8, num_layers=1, num_heads=1, num_kv_heads=1,
        embedding_dim=8,
    )  # fmt: skip
    ids = torch.randint(0, 16, (8, 8))
    settings = {
        "train": {"horizon": "1 steps", "micro_batch": 4},
        "optimizer": {"weight_decay": 3.0},
        "evaluate": {"every": "never"},
        "log": {"console": "off"},
    }
    data = {"input_ids": ids, "colour": ids}
    trainer = Trainer(GPT(shape), data, GenerationTask(16), settings=settings, runs=tmp_path)
    folder = trainer.fit().folder
    assert folder is not None
    notes = [e.message for e in read_events(folder / "events.jsonl") if e.kind == "note"]
    assert any("weight decay 3" in note for note in notes)
    assert any("the data holds colour" in note for note in notes)
