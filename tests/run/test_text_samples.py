"""What a finished text run shows: a sample, and how far it is from a simple model."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from assembly.parts import material
from surefoot import run_recipe
from surefoot.assembly.material import Prepared
from surefoot.config.load import load_recipe
from surefoot.run.text_samples import SAMPLE_NAME, finish_with_samples


def test_a_model_that_writes_no_text_shows_nothing(tmp_path: Path) -> None:
    made = material()
    result: Any = SimpleNamespace(model=made.model, metrics={})
    assert list(finish_with_samples(result, Prepared(made), tmp_path)) == []
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_text_run_writes_a_sample_and_how_far_it_is_from_a_bigram(tmp_path: Path) -> None:
    small = ["model.num_layers=1", "train.horizon=2 steps", "device=cpu", "log.console=off"]
    result = run_recipe(load_recipe("stdlib-gpt", small), run_root=tmp_path)
    assert result.folder is not None
    sample = (result.folder / "artifacts" / SAMPLE_NAME).read_text()
    assert sample.startswith("def ")
    found = json.loads((result.folder / "artifacts" / "baseline-validation.json").read_text())
    assert found["model_bits_per_byte"] > found["bigram_bits_per_byte"] > 0, "after two updates"
