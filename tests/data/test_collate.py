"""Padding counts for nothing: not in the mask, not in the labels."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from surefoot.core.errors import DataError
from surefoot.data.collate import PaddingCollate, padding_fraction
from surefoot.tasks.generation import GenerationTask


def sample(length: int, **more: Any) -> dict[str, Any]:
    return {"input_ids": torch.arange(1, length + 1), **more}


def test_sequences_are_padded_to_the_longest() -> None:
    batch = PaddingCollate(pad_id=9)([sample(2), sample(4), sample(1)])
    assert batch["input_ids"].tolist() == [[1, 2, 9, 9], [1, 2, 3, 4], [1, 9, 9, 9]]
    assert batch["attention_mask"].tolist() == [[1, 1, 0, 0], [1, 1, 1, 1], [1, 0, 0, 0]]
    assert batch["labels"].tolist() == [[1, 2, -100, -100], [1, 2, 3, 4], [1, -100, -100, -100]]
    assert padding_fraction(batch) == 5 / 12


def test_the_weight_of_padding_is_zero() -> None:
    task = GenerationTask(vocabulary_size=100)
    samples = [sample(length) for length in (2, 5, 3, 7)]
    together = task.weight(PaddingCollate()(samples))
    assert together == sum(task.weight(PaddingCollate()([one])) for one in samples) == 13


def test_own_labels_and_other_values_are_kept() -> None:
    samples = [
        sample(3, labels=[-100, 2, 3], weights=np.ones(3), kind=1),
        sample(2, labels=[1, 2], weights=np.ones(2), kind=0),
    ]
    batch = PaddingCollate()(samples)
    assert batch["labels"].tolist() == [[-100, 2, 3], [1, 2, -100]]
    assert batch["weights"].tolist() == [[1, 1, 1], [1, 1, 0]]
    assert batch["kind"].tolist() == [1, 0]


def test_length_is_rounded_up() -> None:
    batch = PaddingCollate(multiple_of=8)([sample(9), sample(3)])
    assert batch["input_ids"].shape == (2, 16)
    assert int(batch["attention_mask"].sum()) == 12


def test_targets_of_another_task_get_no_labels() -> None:
    samples = [sample(3, label=1), sample(2, label=0)]
    for collate in (PaddingCollate(add_labels=False), PaddingCollate()):
        batch = collate(samples)
        assert "labels" not in batch and batch["label"].tolist() == [1, 0]


def test_what_cannot_be_padded_is_refused() -> None:
    with pytest.raises(DataError, match="a sample is int64"):
        PaddingCollate()([torch.arange(3)])
    with pytest.raises(DataError, match=r"a sample is \{x: int\}"):
        PaddingCollate()([{"x": 1}])
    with pytest.raises(DataError, match="different keys"):
        PaddingCollate()([sample(3, label=1), sample(3)])


def padded_before(length: int, total: int = 12) -> dict[str, Any]:
    """A sample that was padded when it was made, and says so in its mask."""
    ids = torch.cat([torch.arange(1, length + 1), torch.zeros(total - length, dtype=torch.long)])
    return {"input_ids": ids, "attention_mask": (torch.arange(total) < length).long()}


def test_a_mask_that_samples_bring_says_what_counts() -> None:
    samples = [padded_before(length) for length in range(4, 12)]
    batch = PaddingCollate()(samples)
    assert GenerationTask(64).weight(batch) == sum(range(3, 11)) == 52
    assert torch.equal(batch["attention_mask"], torch.stack([s["attention_mask"] for s in samples]))
    assert batch["labels"][0].tolist() == [1, 2, 3, 4] + [-100] * 8


def test_masks_of_unequal_length_are_padded_with_zero() -> None:
    batch = PaddingCollate()([padded_before(2, 3), padded_before(5, 6)])
    assert batch["attention_mask"].tolist() == [[1, 1, 0, 0, 0, 0], [1, 1, 1, 1, 1, 0]]
    assert batch["labels"].tolist() == [[1, 2] + [-100] * 4, [1, 2, 3, 4, 5, -100]]


def test_first_tokens_of_documents_are_no_labels() -> None:
    samples = [sample(4, document_ids=[0, 0, 1, 1]), sample(2, document_ids=[0, 1])]
    batch = PaddingCollate()(samples)
    assert batch["labels"].tolist() == [[1, 2, -100, 4], [1, -100, -100, -100]]
    del batch["labels"]
    stacked = PaddingCollate(add_labels=False)(samples)
    task = GenerationTask(64)
    assert task.weight(PaddingCollate()(samples)) == task.weight(stacked)


@pytest.mark.parametrize("mask", [[1, 1], 1, torch.ones(2, 3)])
def test_a_mask_of_another_length_is_refused(mask: Any) -> None:
    with pytest.raises(DataError, match=r"attention_mask is .* beside 3 tokens") as caught:
        PaddingCollate()([sample(3, attention_mask=[1, 1, 1]), sample(3, attention_mask=mask)])
    assert caught.value.batch_position == 1
