"""Digests of the random state that decides a loader's order. Draws nothing."""

from __future__ import annotations

import hashlib
from typing import Any

import torch


def generator_digest(loader: Any) -> str:
    """A digest of the state of the generator that the next epoch of `loader` will use."""
    generator = getattr(loader.sampler, "generator", None) or loader.generator
    state = torch.get_rng_state() if generator is None else generator.get_state()
    return hashlib.blake2b(state.numpy().tobytes(), digest_size=8).hexdigest()
