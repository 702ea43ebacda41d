"""Randomness of samples: keyed by (seed, epoch, sample id), never drawn from a stream.

Whatever a sample draws from Python's, NumPy's or torch's global generators while it is read depends
on its key alone, and the training never sees that it was drawn.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from surefoot.data.order import sample_seed


@contextmanager
def preserved_cpu_rng() -> Iterator[None]:
    """Puts the global CPU generators back as they were, also after an error."""
    python_state = random.getstate()
    numpy_state = np.random.get_state()
    torch_state = torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        torch.set_rng_state(torch_state)


def seed_for_sample(seed: int, epoch: int, sample_id: int) -> None:
    """Set the global CPU generators for reading one sample. Call inside `preserved_cpu_rng`."""
    key = sample_seed(seed, epoch, sample_id)
    random.seed(key)
    np.random.seed([key & 0xFFFFFFFF, key >> 32])
    # `torch.manual_seed` would reseed the accelerators too, which no sample may touch.
    torch.default_generator.manual_seed(key)


class AugmentedSource:
    """A source whose samples pass through a random transform.

    Args:
        source: where samples come from.
        transform: `transform(sample) -> sample`; it may draw from Python's, NumPy's or torch's
            global generators, which are keyed by (seed, epoch, sample id).
    """

    is_random = True

    def __init__(self, source: Any, transform: Callable[[Any], Any]) -> None:
        self._source = source
        self._transform = transform
        self.name: str = source.name

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, index: int) -> Any:
        return self._transform(self._source[index])

    def collate(self, samples: Sequence[Any]) -> Any:
        return self._source.collate(samples)

    def locate(self, index: int) -> str:
        """Where a sample comes from, for messages."""
        inner = getattr(self._source, "locate", None)
        return str(inner(index)) if inner else f"sample {index} of {self._source.name}"

    def fingerprint(self) -> str:
        """Fingerprint of the samples before the transform."""
        return str(self._source.fingerprint())
