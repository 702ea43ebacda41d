"""Digits, diabetes and arrays from a file: split alike every time, scaled by training alone."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from surefoot.core.errors import DataError, MissingDataError
from surefoot.data.sources.base import DataSplits
from surefoot.data.sources.tables import open_arrays, open_diabetes, open_digits


def whole(source: Any) -> tuple[torch.Tensor, ...]:
    return source.batch(np.arange(len(source)))


def no_shared_rows(splits: DataSplits) -> bool:
    train = whole(splits.train)[0].flatten(1)
    rows = {row.numpy().tobytes() for row in train}
    held_out = whole(splits.validation["validation"])[0].flatten(1)
    return not any(row.numpy().tobytes() in rows for row in held_out)


def test_digits() -> None:
    pytest.importorskip("sklearn")
    splits = open_digits()
    images, labels = whole(splits.train)
    assert images.shape == (1438, 1, 8, 8) and images.dtype == torch.float32
    assert labels.dtype == torch.int64 and set(labels.tolist()) == set(range(10))
    assert len(splits.validation["validation"]) == 359
    assert abs(float(images.double().mean())) < 1e-6
    assert abs(float(images.double().std(correction=0)) - 1) < 1e-6
    held_out, _ = whole(splits.validation["validation"])
    assert float(held_out.mean()) != 0.0, "statistics come from training alone"
    assert no_shared_rows(splits)
    assert splits.sizes["num_classes"] == 10 and splits.sizes["in_channels"] == 1
    assert json.loads(json.dumps(splits.facts)) == splits.facts
    assert open_digits().train.fingerprint() == splits.train.fingerprint()
    assert open_digits(0.0).validation == {}


def test_diabetes() -> None:
    pytest.importorskip("sklearn")
    splits = open_diabetes()
    features, target = whole(splits.train)
    assert features.shape == (354, 10) and target.shape == (354, 1)
    assert features.dtype == target.dtype == torch.float32
    for column in (*features.double().t(), target.double().flatten()):
        assert abs(float(column.mean())) < 1e-6
        assert abs(float(column.std(correction=0)) - 1) < 1e-6
    assert len(splits.validation["validation"]) == 88
    assert no_shared_rows(splits)
    # The numbers bring the target back.
    scale, mean = splits.facts["target_deviation"], splits.facts["target_mean"]
    assert 20 < float(target.min()) * scale + mean < 30
    assert json.loads(json.dumps(splits.facts)) == splits.facts
    assert splits.sizes == {"in_features": 10, "out_features": 1}


def test_without_scikit_learn_the_remedy_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn", None)
    for opened in (open_digits, open_diabetes):
        with pytest.raises(MissingDataError) as caught:
            opened()
        assert "pip install" in caught.value.remedy


def test_arrays_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "data.npz"
    np.savez(path, inputs=np.arange(40.0).reshape(20, 2), targets=np.arange(20) % 3)
    splits = open_arrays(path, validation_fraction=0.25)
    assert (len(splits.train), len(splits.validation["validation"])) == (15, 5)
    assert splits.sizes == {"in_features": 2, "num_classes": 3, "out_features": 3}
    assert splits.train.name == "data.npz train"
    assert no_shared_rows(splits)
    inputs, targets = whole(splits.train)
    assert ((inputs[:, 0] / 2 % 3).long() == targets).all(), "rows stay together"
    np.savez(path, x=np.zeros((4, 3, 8, 8)), y=np.zeros((4, 2)))
    other = open_arrays(path, inputs="x", targets="y")
    assert other.sizes == {"in_features": 192, "in_channels": 3, "out_features": 2}


def test_a_file_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    with pytest.raises(MissingDataError, match=r"the file .* does not exist"):
        open_arrays(tmp_path / "nothing.npz")
    path = tmp_path / "data.npz"
    np.savez(path, a=np.zeros(3), b=np.zeros(3))
    with pytest.raises(DataError, match="has no array 'inputs'") as caught:
        open_arrays(path)
    assert caught.value.rule == "the file holds a, b"
    np.savez(path, inputs=np.zeros(3), targets=np.zeros(4))
    with pytest.raises(DataError, match="differ in length"):
        open_arrays(path)
    np.savez(path, inputs=np.array([{}, {}]), targets=np.zeros(2))
    with pytest.raises(DataError, match="cannot be read"):
        open_arrays(path)
    path.write_bytes(b"hello")
    with pytest.raises(DataError, match="cannot be read"):
        open_arrays(path)
    np.save(tmp_path / "one.npy", np.zeros(3))
    with pytest.raises(DataError, match="a single unnamed array"):
        open_arrays(tmp_path / "one.npy")
