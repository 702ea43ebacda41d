"""The bigram equals its formula, sums to one, and learns from training tokens only."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest

from surefoot.core.errors import DataError
from surefoot.data.bigram import bits_per_byte, fit_bigram

VOCABULARY = 5


def tokens(seed: int, size: int = 400) -> np.ndarray:
    generator = np.random.default_rng(seed)
    chain = [0]
    for _ in range(size - 1):
        jump = int(generator.integers(VOCABULARY - 1))
        chain.append((chain[-1] + 1) % VOCABULARY if generator.random() < 0.7 else jump)
    return np.array(chain)


def naive(train: np.ndarray, last: int, following: int, mix: float) -> float:
    pairs = Counter(zip(train[:-1].tolist(), train[1:].tolist(), strict=True))
    firsts = Counter(train[:-1].tolist())
    singles = Counter(train.tolist())
    unigram = (singles[following] + 1) / (len(train) + VOCABULARY)
    conditional = pairs[last, following] / firsts[last] if firsts[last] else 0.0
    return mix * conditional + (1 - mix) * unigram


def test_bits_equal_the_formula() -> None:
    train, other = tokens(0), tokens(1)
    bigram = fit_bigram(train, VOCABULARY)
    expected = [
        -math.log2(naive(train, a, b, bigram.mix))
        for a, b in zip(other[:-1].tolist(), other[1:].tolist(), strict=True)
    ]
    np.testing.assert_allclose(bigram.bits(other), expected, rtol=1e-12)


def test_probabilities_of_a_context_sum_to_one() -> None:
    bigram = fit_bigram(tokens(0), VOCABULARY)
    for last in range(VOCABULARY - 1):
        pairs = [bigram.bits([last, following])[0] for following in range(VOCABULARY)]
        assert sum(2.0**-bits for bits in pairs) == pytest.approx(1.0, rel=1e-12)


def test_unseen_tokens_cost_finitely_many_bits() -> None:
    bigram = fit_bigram(tokens(0) % 3, VOCABULARY)
    assert np.isfinite(bigram.bits([4, 4, 0, 4])).all()


def test_it_beats_a_unigram_where_order_matters() -> None:
    train, other = tokens(0), tokens(1)
    bigram = fit_bigram(train, VOCABULARY)
    unigram = -np.log2(bigram.unigram[other[1:]]).sum()
    assert bigram.bits(other).sum() < 0.9 * unigram
    assert bigram.mix > 0.5


def test_bits_per_byte_divides_by_the_bytes_of_what_is_predicted() -> None:
    train, other = tokens(0), tokens(1)
    bigram = fit_bigram(train, VOCABULARY)
    lengths = np.array([1, 2, 3, 4, 5])
    expected = bigram.bits(other).sum() / lengths[other[1:]].sum()
    assert bits_per_byte(bigram, other, lengths) == expected


def test_too_few_tokens_are_refused() -> None:
    with pytest.raises(DataError, match="too few"):
        fit_bigram([0, 1, 2], VOCABULARY)
