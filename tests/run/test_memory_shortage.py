"""Where memory runs out, the run says what held it and what to try."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from parallel.small_runs import assembled, settings_of
from surefoot import Trainer
from surefoot.engine.refusal import is_out_of_memory
from surefoot.observe.events import read_events
from surefoot.observe.readers.run_data import read_run
from surefoot.report.run_page import write_page
from surefoot.run.memory_shortage import advice, memory_table

INPUTS = torch.zeros(16, 4)
TARGETS = torch.zeros(16, 1)


class Greedy(nn.Module):
    """Asks for more than any machine has, at its third forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)
        self.calls = 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.calls += self.training
        if self.calls == 3:
            torch.empty(1 << 60)
        out: torch.Tensor = self.layer(inputs)
        return out


def squared_error_sum(model: nn.Module, batch: Any) -> torch.Tensor:
    return (model(batch[0]) - batch[1]).pow(2).sum()


def trainer(runs: Path, model: nn.Module, **optimizer: Any) -> Trainer:
    settings = {
        "train": {"horizon": "4 steps", "micro_batch": 4},
        "optimizer": {"kind": "adamw", "lr": 1e-2, **optimizer},
        "schedule": {"kind": "constant"},
        "log": {"console": "off"},
    }
    return Trainer(model, (INPUTS, TARGETS), squared_error_sum, settings=settings, runs=runs)


def test_a_run_that_runs_out_of_memory_leaves_a_table_and_advice(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError) as caught:
        trainer(tmp_path, Greedy()).fit()
    assert "what held the memory:" in "".join(caught.value.__notes__)
    (run,) = tmp_path.iterdir()
    found = json.loads((run / "artifacts" / "out-of-memory.json").read_text())
    assert found["table"]["weights"] == found["table"]["gradients"] == 20
    assert found["largest_tensors"]
    # Most of it is Python and torch: no activation was ever that large.
    assert found["table"]["rest_of_the_process"] > 1 << 20
    assert "activations_batch_and_workspace" not in found["table"]
    assert not any(entry["saves_bytes"] for entry in found["advice"][:-1])
    assert "train.micro_batch=2 with train.accumulation=2" in found["advice"][0]["do"]
    kinds = [event.kind for event in read_events(run / "events.jsonl")]
    assert kinds[-1] == "failure"
    text = write_page(read_run(run)).read_text("utf-8")
    assert "Out of memory" in text and "micro_batch=2" in text


def test_the_table_counts_weights_gradients_and_state(tmp_path: Path) -> None:
    model = nn.Linear(4, 1)
    assembly = trainer(tmp_path, model)._assemble()
    weights = 5 * 4
    expected = {"weights": weights, "gradients": weights, "optimizer_state": 2 * weights}
    assert memory_table(assembly) == expected
    model.weight.requires_grad_(False)
    frozen = trainer(tmp_path, model)._assemble()
    assert memory_table(frozen) == {"weights": 20, "gradients": 4, "optimizer_state": 8}


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), True),
        (MemoryError(), True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), True),
        (RuntimeError("shapes cannot be multiplied"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_which_errors_say_so(error: BaseException, told: bool) -> None:
    assert is_out_of_memory(error) is told


def test_scores_of_a_large_vocabulary_are_advised_in_chunks() -> None:
    def of_the_loss(**memory: Any) -> list[dict[str, Any]]:
        assembly = assembled("gpt", settings_of(memory={"loss_chunk": 10, **memory}))
        found = [e for e in advice(assembly, memory_table(assembly), 10**6) if "loss" in e["do"]]
        assembly.close()
        return found

    (entry,) = of_the_loss()
    # Four sequences of ten tokens, all but ten at once: 24 words in float32, and their gradient.
    assert entry["saves_bytes"] == 30 * 24 * 8
    assert entry["do"].startswith("memory.loss=chunked")
    assert not of_the_loss(loss="chunked")
    assert not of_the_loss(loss_chunk=40)
