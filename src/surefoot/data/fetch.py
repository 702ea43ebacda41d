"""Turns one planned micro-batch into a collated batch and its weights, on the CPU.

The same function runs in the process of the training and in workers, so both give the same bits.
It knows nothing of order, devices or processes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from surefoot.core.errors import DataError, SurefootError
from surefoot.data.augment import preserved_cpu_rng, seed_for_sample
from surefoot.data.batch import SINGLE_TERM, describe
from surefoot.data.order import IndexArray

WeightFunction = Callable[[Any], float | Mapping[str, float]]


@dataclass(frozen=True)
class Fetcher:
    """Reads and collates samples of one source.

    Args:
        source: a `Source`.
        weight: loss-bearing items of a collated CPU batch.
        seed: key of the randomness of samples.
    """

    source: Any
    weight: WeightFunction
    seed: int

    def __call__(self, epoch: int, indices: IndexArray) -> tuple[Any, dict[str, float]]:
        """Collated batch and its weights.

        Raises:
            DataError: a sample cannot be read, samples do not fit together, or the weight is not
                a number >= 0; the dataset and the sample ids are named.
        """
        source = self.source
        if source.is_random:
            with preserved_cpu_rng():
                samples = []
                for index in indices.tolist():
                    seed_for_sample(self.seed, epoch, index)
                    samples.append(self._read(index))
                # What collation draws (a mask, a mix of samples) is keyed by the batch's first id.
                seed_for_sample(self.seed, epoch, int(indices[0]))
                return self._finish(self._collate(samples, indices), indices)
        batch_of = getattr(source, "batch", None)
        if batch_of is not None:
            try:
                data = batch_of(indices)
            except SurefootError:
                raise
            except Exception as error:
                raise self._failure("reading", indices.tolist(), error) from error
        else:
            samples = [self._read(index) for index in indices.tolist()]
            data = self._collate(samples, indices)
        return self._finish(data, indices)

    def _finish(self, data: Any, indices: IndexArray) -> tuple[Any, dict[str, float]]:
        return data, checked_weights(self.weight, data, self.source.name, indices.tolist())

    def _read(self, index: int) -> Any:
        try:
            return self.source[index]
        except Exception as error:
            raise self._failure("reading", [index], error) from error

    def _collate(self, samples: Sequence[Any], indices: IndexArray) -> Any:
        try:
            return self.source.collate(samples)
        except SurefootError:
            raise
        except Exception as error:
            shapes = "; ".join(
                f"sample {index}: {describe(sample)}"
                for index, sample in zip(indices.tolist()[:8], samples, strict=False)
            )
            raise DataError(
                f"samples of {self.source.name} do not fit into one batch: {error}",
                where=shapes + ("; …" if len(samples) > 8 else ""),
                rule="the samples of a micro-batch have equal types and shapes",
                remedy="give the dataset a collate function, such as padding_collate",
            ) from error

    def _failure(self, doing: str, ids: list[int], error: Exception) -> DataError:
        detail = f"{type(error).__name__}: {error}"
        if isinstance(error, SurefootError):
            detail = str(error)
        return DataError(
            f"{doing} {_samples(ids)} of {self.source.name} failed: {detail}",
            where=f"{self.source.name}, {_samples(ids)}",
            rule="every sample of a dataset can be read",
            remedy="correct or remove the sample",
        )


def checked_weights(
    weight: WeightFunction, data: Any, name: str, ids: list[int]
) -> dict[str, float]:
    """Weights of a CPU batch as a mapping, with the sample at fault named where one is."""
    try:
        value = weight(data)
    except DataError as error:
        position = getattr(error, "batch_position", None)
        place = f"{name}, {_samples(ids)}"
        if isinstance(position, int) and position < len(ids):
            place = f"{name}, sample {ids[position]}"
        error.where = f"{place}: {error.where}" if error.where else place
        raise
    except Exception as error:
        raise DataError(
            f"the weight of a batch of {name} could not be computed: "
            f"{type(error).__name__}: {error}",
            where=f"{name}, {_samples(ids)}: {describe(data)}",
            rule="weight(batch) works on every collated batch, on the CPU",
        ) from error
    weights = dict(value) if isinstance(value, Mapping) else {SINGLE_TERM: value}
    for term, number in weights.items():
        weights[term] = number = float(number)
        if not 0.0 <= number < float("inf"):
            raise DataError(
                f"the weight of a batch of {name} is {number} ({term})",
                where=f"{name}, {_samples(ids)}",
                rule="a weight is a finite number >= 0",
            )
    return weights


def _samples(ids: list[int]) -> str:
    if len(ids) == 1:
        return f"sample {ids[0]}"
    shown = ", ".join(map(str, ids[:16]))
    return f"samples {shown}{', …' if len(ids) > 16 else ''}"
