"""A recipe that trains in a second, on text that it makes itself."""

from __future__ import annotations

from pathlib import Path

import pytest

RECIPE = """\
name: tiny
model:
  kind: gpt
  num_layers: 1
  num_heads: 2
  embedding_dim: 8
  feedforward_dim: 16
data:
  kind: text
  source: files
  path: {path}
  vocabulary_size: 260
  sequence_length: 8
task:
  kind: generation
optimizer:
  kind: adamw
  lr: 1e-2
schedule:
  kind: warmup_cosine
  warmup: 5
train:
  horizon: 20 steps
  micro_batch: 2
"""


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    texts = tmp_path / "texts"
    texts.mkdir()
    for n in range(4):
        (texts / f"{n}.txt").write_text(f"file {n}: " + f"so {n} it goes on and on. " * 20)
    path = tmp_path / "tiny.yaml"
    path.write_text(RECIPE.format(path=texts))
    return str(path)
