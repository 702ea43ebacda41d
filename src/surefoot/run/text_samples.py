"""What a finished run shows of what it learned: a sample of text, and how far from a simple model.

Draws from a generator of its own, and writes into the artifacts of the run only.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import torch

from surefoot.assembly.material import Prepared
from surefoot.data.bigram import bits_per_byte, fit_bigram
from surefoot.models.gpt import GPT
from surefoot.run.folder_run import RunResult

SAMPLE_NAME = "sample.txt"
PROMPT = "def "
NUM_NEW_TOKENS = 160
TEMPERATURE = 0.8
TOP_K = 40


def finish_with_samples(result: RunResult, prepared: Prepared, artifacts: Path) -> Iterator[str]:
    """Lines for people about what was learned; nothing for models that write no text."""
    if prepared.text is None or not isinstance(result.model, GPT):
        return
    yield from compare_with_bigram(result, prepared, artifacts)
    sample = sample_text(result.model, prepared)
    (artifacts / SAMPLE_NAME).write_text(sample, encoding="utf-8")
    yield f"\na sample of what it writes (also in artifacts/{SAMPLE_NAME}):\n"
    yield sample


def compare_with_bigram(result: RunResult, prepared: Prepared, artifacts: Path) -> Iterator[str]:
    """How the model compares with a bigram fitted on the training tokens, in bits per byte.

    Both predict the same tokens of the validation set: each but the first.
    """
    text = prepared.text
    assert text is not None
    for name, source in text.splits.validation.items():
        model_bits = result.metrics.get(f"{name}/bits_per_byte")
        if model_bits is None:
            continue
        bigram = fit_bigram(text.splits.train.shard.tokens, text.tokenizer.vocabulary_size)
        bigram_bits = bits_per_byte(bigram, source.shard.tokens, text.bytes_per_token.numpy())
        found = {"model_bits_per_byte": model_bits, "bigram_bits_per_byte": bigram_bits}
        (artifacts / f"baseline-{name}.json").write_text(json.dumps(found), encoding="utf-8")
        verdict = "below" if model_bits < bigram_bits else "NOT below"
        yield (
            f"\n{name}: {model_bits:.3f} bits per byte, {verdict} the {bigram_bits:.3f} of an "
            f"interpolated bigram (mix {bigram.mix:g}) fitted on the training tokens"
        )


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
