"""Randomness of samples: keyed by (seed, epoch, sample id), never drawn from a running stream.

Whatever reading a sample draws from Python's, NumPy's or torch's global generators depends on its
key alone; the generators of the training are restored afterwards.
"""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
import torch

from surefoot.data.order import sample_seed

Read = TypeVar("Read")
HAS_GAUSS = 3
"""Index in `numpy.random.get_state()` of the flag for a cached normal number."""


@contextmanager
def preserved_cpu_rng() -> Iterator[None]:
    """Restores the global CPU generators, also after an error."""
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
    """Seeds the global CPU generators for reading one sample. Call in `preserved_cpu_rng`."""
    key = sample_seed(seed, epoch, sample_id)
    random.seed(key)
    np.random.seed([key & 0xFFFFFFFF, key >> 32])
    # `torch.manual_seed` would also reseed the accelerators.
    torch.default_generator.manual_seed(key)


class DrawWatch:
    """Detects whether reading samples draws from a global CPU generator.

    Seeding three generators per sample takes longer than reading most samples. If nothing is drawn,
    no seed matters, and one check per batch is enough.
    """

    def __init__(self) -> None:
        self._numpy: tuple[bytes, Any] | None = None

    def read(self, read: Callable[[], Read]) -> Read | None:
        """The result of `read()`, or None if it drew a number or failed.

        The generators are unchanged in either case.
        """
        python_state = random.getstate()
        torch_state = torch.default_generator.get_state()
        numpy_memory, numpy_state = self._read_numpy()
        found = None
        drew = True
        try:
            # NumPy may hold a cached normal number: using it would change no generator state.
            if not numpy_state[HAS_GAUSS]:
                found = read()
                drew = (
                    numpy_memory != _numpy_memory()
                    or not torch.equal(torch_state, torch.default_generator.get_state())
                    or python_state != random.getstate()
                )
        except Exception:
            return None  # Read again with its seed, so that a failure is reproducible.
        finally:
            if drew:
                random.setstate(python_state)
                np.random.set_state(numpy_state)
                torch.default_generator.set_state(torch_state)
        return None if drew else found

    def _read_numpy(self) -> tuple[bytes, Any]:
        """NumPy's state as raw memory and as `get_state` returns it, which is 50 times slower."""
        memory = _numpy_memory()
        if self._numpy is None or self._numpy[0] != memory or self._numpy[1][HAS_GAUSS]:
            self._numpy = memory, np.random.get_state()
        return self._numpy


def _numpy_memory() -> bytes:
    """The state of NumPy's global Mersenne Twister: 624 words and the position in them."""
    return ctypes.string_at(np.random.mtrand.get_bit_generator().ctypes.state_address, 4 * 625)


class AugmentedSource:
    """A source whose samples pass through a random transform.

    Args:
        source: the source of the samples.
        transform: `transform(sample) -> sample`; may draw from Python's, NumPy's or torch's global
            generators, which are keyed by (seed, epoch, sample id).

    >>> from surefoot.data.sources.datasets import as_source
    >>> AugmentedSource(as_source([1.0, 2.0], "numbers"), lambda sample: sample + random.random())
    AugmentedSource('numbers', 2 samples)
    """

    is_random = True

    def __init__(self, source: Any, transform: Callable[[Any], Any]) -> None:
        self._source = source
        self._transform = transform
        self.name: str = source.name

    def __repr__(self) -> str:
        return f"AugmentedSource({self.name!r}, {len(self):,} samples)"

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, index: int) -> Any:
        return self._transform(self._source[index])

    def collate(self, samples: Sequence[Any]) -> Any:
        return self._source.collate(samples)

    def locate(self, index: int) -> str:
        """Origin of a sample, for messages."""
        inner = getattr(self._source, "locate", None)
        return str(inner(index)) if inner else f"sample {index} of {self._source.name}"

    def fingerprint(self) -> str:
        """Fingerprint of the samples before the transform."""
        return str(self._source.fingerprint())
