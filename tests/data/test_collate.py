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
    batch = PaddingCollate(add_labels=False)(samples)
    assert "labels" not in batch and batch["label"].tolist() == [1, 0]


def test_what_cannot_be_padded_is_refused() -> None:
    with pytest.raises(DataError, match="a sample is int64"):
        PaddingCollate()([torch.arange(3)])
    with pytest.raises(DataError, match=r"a sample is \{x: int\}"):
        PaddingCollate()([{"x": 1}])
    with pytest.raises(DataError, match="different keys"):
        PaddingCollate()([sample(3, label=1), sample(3)])
