"""An interpolated bigram model: the baseline that a trained language model must beat.

Counts pairs of neighbouring tokens. Both the counts and the mixing weight are fitted on training
tokens only.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from surefoot.core.errors import DataError

Tokens = npt.NDArray[np.int64]

HELD_OUT_DIVISOR = 20
"""1 / 20 of the training tokens, the last ones, select the mixing weight."""
MIXING_WEIGHTS = tuple(n / 20 for n in range(1, 20))


@dataclass(frozen=True)
class Bigram:
    """`p(next | last) = mix * count(last, next) / count(last) + (1 - mix) * p(next)`.

    `p(next)` is the token's share with one added to each count, so it is never 0. See Jelinek
    and Mercer, "Interpolated estimation of Markov source parameters from sparse data" (1980).
    """

    vocabulary_size: int
    pairs: npt.NDArray[np.int64]
    """Sorted codes `last * vocabulary_size + next` of the observed pairs."""
    pair_counts: npt.NDArray[np.int64]
    counts: npt.NDArray[np.int64]
    """How often each token was observed as the first of a pair."""
    unigram: npt.NDArray[np.float64]
    mix: float

    def bits(self, tokens: npt.ArrayLike) -> npt.NDArray[np.float64]:
        """Bits of each token but the first, given the previous one: `-log2 p`, [N - 1]."""
        ids = np.asarray(tokens, dtype=np.int64)
        last, following = ids[:-1], ids[1:]
        seen = self._conditional(last, following)
        return -np.log2(self.mix * seen + (1 - self.mix) * self.unigram[following])

    def _conditional(self, last: Tokens, following: Tokens) -> npt.NDArray[np.float64]:
        codes = last * self.vocabulary_size + following
        places = np.minimum(np.searchsorted(self.pairs, codes), self.pairs.size - 1)
        counted = np.where(self.pairs[places] == codes, self.pair_counts[places], 0)
        return counted / np.maximum(self.counts[last], 1)


def fit_bigram(tokens: npt.ArrayLike, vocabulary_size: int) -> Bigram:
    """Fits a bigram on training tokens; the mixing weight is the best on their last part.

    Args:
        tokens: integers in [0, vocabulary_size), [N].

    Raises:
        DataError: there are too few tokens.
    """
    ids = np.asarray(tokens, dtype=np.int64)
    if ids.size < 2 * HELD_OUT_DIVISOR:
        raise DataError(f"{ids.size} tokens are too few to fit a bigram", rule="at least 40")
    border = ids.size - ids.size // HELD_OUT_DIVISOR
    first = _counted(ids[:border], vocabulary_size, MIXING_WEIGHTS[0])
    held_out = ids[border:]
    mixes = {mix: float(replace(first, mix=mix).bits(held_out).sum()) for mix in MIXING_WEIGHTS}
    return _counted(ids, vocabulary_size, min(mixes, key=mixes.__getitem__))


def bits_per_byte(bigram: Bigram, tokens: npt.ArrayLike, bytes_per_token: npt.ArrayLike) -> float:
    """Bits of all tokens but the first, divided by the bytes that they encode."""
    ids = np.asarray(tokens, dtype=np.int64)
    return float(bigram.bits(ids).sum() / np.asarray(bytes_per_token)[ids[1:]].sum())


def _counted(ids: Tokens, vocabulary_size: int, mix: float) -> Bigram:
    codes = ids[:-1] * vocabulary_size + ids[1:]
    pairs, pair_counts = np.unique(codes, return_counts=True)
    counts = np.bincount(ids[:-1], minlength=vocabulary_size)
    smoothed = np.bincount(ids, minlength=vocabulary_size) + 1.0
    return Bigram(vocabulary_size, pairs, pair_counts, counts, smoothed / smoothed.sum(), mix)
