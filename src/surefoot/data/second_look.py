"""Reads a few samples twice, before a run guarantees to see the same ones again.

Each is read twice under the same seed. Judges nothing of their content.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from surefoot.core.interruption import RAISED_BY_USER_CODE
from surefoot.data.augment import preserved_cpu_rng, seed_for_sample
from surefoot.data.fetch import place_of
from surefoot.data.fingerprint import hash_value

NUM_LOOKED_AT = 3
"""First, middle and last sample."""


def second_look(source: Any) -> Iterator[str]:
    """A sentence where a sample is another one when it is read again, or the length has changed.

    Args:
        source: a `Source`. A sample that cannot be read is left to whoever reads it for training.
    """
    length = len(source)
    places = sorted({0, length // 2, length - 1})[:NUM_LOOKED_AT]
    with preserved_cpu_rng():
        for index in places:
            digests = []
            try:
                for _ in range(2):
                    seed_for_sample(0, 0, index)
                    digests.append(hash_value(source[index]))
            except RAISED_BY_USER_CODE:
                return
            if digests[0] != digests[1]:
                yield (
                    f"{place_of(source, [index])} is another one each time it is read, with the "
                    "random generators of Python, NumPy and torch seeded alike: a resumed run does "
                    "not see the same samples. Draw from those generators, or from one that is "
                    "seeded in __getitem__"
                )
                return
    if (now := len(source)) != length:
        yield f"{source.name} had {length} samples and has {now} after a few were read"
