"""Packs: every token once, never across sequences, and planned the same way each time."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from surefoot.core.errors import DataError, RequestError
from surefoot.data.packing import PackedSource, plan_packs
from surefoot.data.sources.datasets import DatasetSource
from surefoot.tasks.generation import GenerationTask


def sequences(lengths: list[int]) -> list[torch.Tensor]:
    """Every token of every sequence is another number, from 1 on."""
    starts = np.cumsum([1, *lengths])
    return [
        torch.arange(start, start + length) for start, length in zip(starts, lengths, strict=False)
    ]


def packed(lengths: list[int], capacity: int, **options: Any) -> PackedSource:
    source = DatasetSource(sequences(lengths), is_random=False, name="lines")
    return PackedSource(source, capacity, **options)


@given(st.lists(st.integers(0, 40), min_size=1, max_size=60), st.integers(2, 16))
@settings(max_examples=150, deadline=None)
def test_every_token_lies_in_one_pack_in_order(lengths: list[int], capacity: int) -> None:
    if not sum(lengths):
        return
    plan = plan_packs(lengths, capacity, "split")
    filled = [
        int(plan.lengths[plan.starts[p] : plan.starts[p + 1]].sum()) for p in range(plan.num_packs)
    ]
    assert max(filled) <= capacity and min(filled) > 0
    pieces = sorted(
        zip(plan.sequences.tolist(), plan.offsets.tolist(), plan.lengths.tolist(), strict=True)
    )
    expected = [
        (sequence, offset, min(capacity, length - offset))
        for sequence, length in enumerate(lengths)
        for offset in range(0, length, capacity)
    ]
    assert pieces == expected
    # Two packs that are at most half full would have been one.
    assert sum(2 * fill <= capacity for fill in filled) <= 1
    assert plan.padding_fraction == pytest.approx(1 - sum(lengths) / (capacity * plan.num_packs))


def test_the_best_fit_is_found() -> None:
    plan = plan_packs([5, 7, 3, 6, 4, 5], 10)
    packs = [
        sorted(plan.sequences[plan.starts[p] : plan.starts[p + 1]].tolist())
        for p in range(plan.num_packs)
    ]
    assert sorted(packs) == [[0, 5], [1, 2], [3, 4]]
    assert plan.padding_fraction == 0


def test_the_plan_is_hashed() -> None:
    first = plan_packs([5, 7, 3], 10)
    assert first.fingerprint() == plan_packs([5, 7, 3], 10).fingerprint()
    others = [plan_packs([5, 7, 4], 10), plan_packs([7, 5, 3], 10), plan_packs([5, 7, 3], 11)]
    assert len({first.fingerprint(), *(other.fingerprint() for other in others)}) == 4


def test_a_pack_tells_its_sequences_apart() -> None:
    # Longest first: sequence 1 (5 tokens), and sequence 2 (2 tokens) fills up to 7 of 8.
    source = packed([4, 5, 2], 8, pad_id=99)
    assert len(source) == 2
    row = source[0]
    assert row["input_ids"].tolist() == [5, 6, 7, 8, 9, 10, 11, 99]
    assert row["labels"].tolist() == [-100, 6, 7, 8, 9, -100, 11, -100]
    assert row["document_ids"].tolist() == [0, 0, 0, 0, 0, 1, 1, 2]
    assert row["position_ids"].tolist() == [0, 1, 2, 3, 4, 0, 1, 0]
    assert source.locate(0) == "sequences [1, 2] of lines"
    batch = source.collate([source[0], source[1]])
    assert batch["input_ids"].shape == (2, 8)


def test_packing_changes_no_weight() -> None:
    lengths = [3, 9, 1, 6, 5, 8, 2]
    source = packed(lengths, 16)
    task = GenerationTask(vocabulary_size=1000)
    batch = source.collate([source[i] for i in range(len(source))])
    assert task.weight(batch) == sum(length - 1 for length in lengths)


def test_own_labels_are_respected() -> None:
    samples = [
        {"input_ids": [1, 2, 3, 4], "labels": [-100, -100, 3, 4]},
        {"input_ids": [5, 6], "labels": [5, -100]},
    ]
    source = PackedSource(DatasetSource(samples, is_random=False), 6)
    assert source[0]["labels"].tolist() == [-100, -100, 3, 4, -100, -100]


def test_a_long_sequence_is_refused_or_split() -> None:
    with pytest.raises(DataError, match="sequence 1 has 9 tokens, a pack 8"):
        packed([3, 9], 8)
    source = packed([3, 9], 8, too_long="split")
    tokens = torch.cat([source[i]["input_ids"] for i in range(len(source))])
    assert sorted(tokens[tokens > 0].tolist()) == list(range(1, 13))


def test_the_fingerprint_follows_data_and_plan() -> None:
    first = packed([3, 4], 8).fingerprint()
    assert packed([3, 4], 8).fingerprint() == first
    assert packed([4, 3], 8).fingerprint() != first
    assert packed([3, 4], 9).fingerprint() != first
    assert packed([3, 4], 8, pad_id=1).fingerprint() != first


def test_impossible_packs_are_refused() -> None:
    with pytest.raises(RequestError):
        plan_packs([1], 1)
    with pytest.raises(DataError, match="no token"):
        plan_packs([0, 0], 4)
    with pytest.raises(RequestError, match="is random"):
        PackedSource(DatasetSource(sequences([3])), 8)
    with pytest.raises(DataError, match="one-dimensional"):
        PackedSource(DatasetSource([torch.ones(2, 3)], is_random=False), 8)
