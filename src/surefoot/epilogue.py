"""What a finished run shows of what it learned: a sample of text, and how far from a simple model.

Draws from a generator of its own, and writes into the artifacts of the run only.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

from surefoot.materials import Prepared
from surefoot.models.gpt import GPT
from surefoot.running import RunResult

SAMPLE_NAME = "sample.txt"
PROMPT = "def "
NUM_NEW_TOKENS = 160
TEMPERATURE = 0.8
TOP_K = 40


def finish_with_samples(result: RunResult, prepared: Prepared, artifacts: Path) -> Iterator[str]:
    """Lines for people about what was learned; nothing for models that write no text."""
    if prepared.text is None or not isinstance(result.model, GPT):
        return
    sample = sample_text(result.model, prepared)
    (artifacts / SAMPLE_NAME).write_text(sample, encoding="utf-8")
    yield f"\na sample of what it writes (also in artifacts/{SAMPLE_NAME}):\n"
    yield sample


def sample_text(model: GPT, prepared: Prepared, prompt: str = PROMPT, seed: int = 0) -> str:
    """Continues `prompt`; the same text for the same weights and seed."""
    assert prepared.text is not None
    tokenizer = prepared.text.tokenizer
    device = next(model.parameters()).device
    ids = torch.tensor([tokenizer.encode(prompt)], device=device)
    generator = torch.Generator(device).manual_seed(seed)
    written = model.generate(
        ids, NUM_NEW_TOKENS, temperature=TEMPERATURE, top_k=TOP_K, generator=generator
    )
    return str(tokenizer.decode(written[0].tolist()))
