"""A digest of what a script computed, so that two runs can be compared bit by bit."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import torch

# Said at the end of each script: every script leaves its weights and measures in `outcome`.
FOOTER = """
import sys
sys.path.insert(0, {tests!r})
from sanitizer_zoo.mutants.outcome import write_digest
write_digest(outcome, __file__)
"""


def with_footer(text: str) -> str:
    """A script that writes the digest of its `outcome` beside itself."""
    return text + FOOTER.format(tests=str(Path(__file__).parents[2]))


def write_digest(outcome: object, script: str) -> None:
    """Writes the digest as text, one file a rank."""
    rank = 0
    if "two_ranks" in Path(script).parent.name:
        rank = int(os.environ["RANK"])
    Path(script).with_suffix(f".{rank}").write_text(digest(outcome))


def digest(value: object) -> str:
    """Equal for equal bits: tensors by their bytes, numbers by their exact text."""
    return hashlib.sha256("\n".join(_parts(value)).encode()).hexdigest()


def _parts(value: object) -> list[str]:
    if isinstance(value, torch.Tensor):
        data = value.detach().contiguous().view(-1)
        if data.dtype is torch.bfloat16:
            data = data.float()
        return [str(tuple(value.shape)), data.numpy().tobytes().hex()]
    if isinstance(value, dict):
        return [part for key in value for part in (str(key), *_parts(value[key]))]
    if isinstance(value, (list, tuple)):
        return [part for item in value for part in _parts(item)]
    return [repr(value)]
