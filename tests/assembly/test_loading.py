"""How long a run is in operations; what a run says of its data."""

from __future__ import annotations

from pathlib import Path

import torch

from surefoot.core.counting import Pace, updates_in
from surefoot.core.units import Flops
from surefoot.models.gpt import GPT, GPTConfig
from surefoot.observe.events import read_events
from surefoot.tasks.generation import GenerationTask
from surefoot.trainer import Trainer


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
