"""Small tables from packages or a single file: digits, diabetes, arrays.

Each has the same split in every run and is standardized by its training part. Nothing is
downloaded.
"""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from surefoot.core.errors import DataError, MissingDataError
from surefoot.data.sources.arrays import ArraySource
from surefoot.data.sources.base import DataSplits
from surefoot.data.sources.datasets import split_indices

_Array = npt.NDArray[Any]


def open_digits(validation_fraction: float = 0.2) -> DataSplits:
    """The 1,797 handwritten digits of scikit-learn.

    A batch is (images float32 [B, 1, 8, 8], labels int64 [B] in 0..9). Pixels are standardized by
    the mean and standard deviation of all training pixels.

    Raises:
        MissingDataError: scikit-learn is not installed.
    """
    bunch = _sklearn("digits").load_digits()
    pixels = np.asarray(bunch.images, dtype=np.float32)[:, None]
    labels = np.asarray(bunch.target, dtype=np.int64)
    train, validation = split_indices(len(labels), validation_fraction)
    mean = float(pixels[train].mean(dtype=np.float64))
    deviation = float(pixels[train].std(dtype=np.float64))
    scaled = ((pixels - np.float32(mean)) / np.float32(deviation)).astype(np.float32)
    facts = {
        "source": "scikit-learn digits",
        "split_rule": f"{len(validation)} of {len(labels)} images by a fixed permutation",
        "pixel_mean": mean,
        "pixel_deviation": deviation,
    }
    sizes = {"in_channels": 1, "num_classes": 10, "in_features": 64, "out_features": 10}
    return _splits("digits", (scaled, labels), train, validation, sizes, facts)


def open_diabetes(validation_fraction: float = 0.2) -> DataSplits:
    """The diabetes table of scikit-learn: 442 patients, ten measurements, progress after a year.

    A batch is (features float32 [B, 10], target float32 [B, 1]). Each column, including the target,
    is standardized by the mean and standard deviation of its training part; `facts` has both.

    Raises:
        MissingDataError: scikit-learn is not installed.
    """
    bunch = _sklearn("diabetes").load_diabetes(scaled=False)
    features = np.asarray(bunch.data, dtype=np.float64)
    target = np.asarray(bunch.target, dtype=np.float64)[:, None]
    train, validation = split_indices(len(target), validation_fraction)
    features, feature_facts = _standardised(features, train)
    target, target_facts = _standardised(target, train)
    facts = {
        "source": "scikit-learn diabetes",
        "split_rule": f"{len(validation)} of {len(target)} rows by a fixed permutation",
        "features": list(map(str, bunch.feature_names)),
        "feature_mean": feature_facts["mean"],
        "feature_deviation": feature_facts["deviation"],
        "target_mean": target_facts["mean"][0],
        "target_deviation": target_facts["deviation"][0],
    }
    sizes = {"in_features": 10, "out_features": 1}
    return _splits("diabetes", (features, target), train, validation, sizes, facts)


def open_arrays(
    path: Path | str,
    *,
    inputs: str = "inputs",
    targets: str = "targets",
    validation_fraction: float = 0.1,
) -> DataSplits:
    """Two arrays of an `.npz` file, without standardization.

    A batch is (inputs [B, …], targets [B, …]).

    Args:
        path: the file.
        inputs: name of the first array.
        targets: name of the second array.
        validation_fraction: share of samples for validation.

    Raises:
        MissingDataError: the file does not exist.
        DataError: it is not an `.npz` file, lacks an array, or contains Python objects.
    """
    arrays = _read_npz(Path(path).expanduser(), (inputs, targets))
    name = Path(path).name
    whole = ArraySource(tuple(arrays), name)
    train, validation = split_indices(len(whole), validation_fraction)
    first, second = arrays
    sizes = {"in_features": int(np.prod(first.shape[1:], dtype=np.int64))}
    if first.ndim == 4:
        sizes["in_channels"] = int(first.shape[1])
    if second.dtype.kind in "iu" and second.ndim == 1 and second.size:
        sizes["num_classes"] = sizes["out_features"] = int(second.max()) + 1
    else:
        sizes["out_features"] = int(np.prod(second.shape[1:], dtype=np.int64))
    facts = {
        "source": name,
        "split_rule": f"{len(validation)} of {len(whole)} samples by a fixed permutation",
        "inputs": {"dtype": str(first.dtype), "shape": list(first.shape)},
        "targets": {"dtype": str(second.dtype), "shape": list(second.shape)},
    }
    return _splits(name, (first, second), train, validation, sizes, facts)


def _sklearn(name: str) -> Any:
    try:
        from sklearn import datasets
    except ImportError as error:
        raise MissingDataError(
            f"the {name} data needs scikit-learn, which is not installed",
            where="data.kind",
            rule=f"the {name} data is part of scikit-learn",
            remedy="pip install 'surefoot[data]'",
        ) from error
    return datasets


def _standardised(values: _Array, train: _Array) -> tuple[_Array, dict[str, list[float]]]:
    mean, deviation = values[train].mean(axis=0), values[train].std(axis=0)
    scaled = ((values - mean) / deviation).astype(np.float32)
    return scaled, {"mean": mean.tolist(), "deviation": deviation.tolist()}


def _splits(
    name: str,
    arrays: tuple[_Array, ...],
    train: _Array,
    validation: _Array,
    sizes: Mapping[str, int],
    facts: Mapping[str, Any],
) -> DataSplits:
    def part(indices: _Array, label: str) -> ArraySource:
        return ArraySource(tuple(array[indices] for array in arrays), f"{name} {label}")

    held_out = {"validation": part(validation, "validation")} if validation.size else {}
    return DataSplits(part(train, "train"), held_out, sizes, facts)


def _read_npz(path: Path, names: tuple[str, ...]) -> list[_Array]:
    if not path.is_file():
        raise MissingDataError(
            f"the file {path} does not exist",
            where="data.path",
            rule="data.path names an .npz file that exists",
            remedy=f"relative paths are resolved from the working directory, {Path.cwd()}",
        )
    try:
        loaded = np.load(path, allow_pickle=False)
        if not isinstance(loaded, np.lib.npyio.NpzFile):
            raise ValueError("it holds a single unnamed array")
        with loaded as archive:
            missing = [name for name in names if name not in archive.files]
            if missing:
                raise DataError(
                    f"{path} has no array {missing[0]!r}",
                    where="data.inputs, data.targets",
                    rule=f"the file holds {', '.join(archive.files) or 'nothing'}",
                    remedy="name two of them",
                )
            return [archive[name] for name in names]
    except (ValueError, OSError, zipfile.BadZipFile) as error:
        raise DataError(
            f"{path} cannot be read: {error}",
            where="data.path",
            rule="an .npz file as numpy.savez writes it, with arrays of numbers",
            remedy="save it with numpy.savez(path, inputs=…, targets=…)",
        ) from error
