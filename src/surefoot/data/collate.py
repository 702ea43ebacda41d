"""Batches of samples of different length: padding, which has no weight.

Pads and stacks; truncates nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import default_collate

from surefoot.core.batches import TARGET_NAMES
from surefoot.core.errors import DataError
from surefoot.data.batch import describe

IGNORE_INDEX = -100
MASK_KEY = "attention_mask"
DOCUMENTS_KEY = "document_ids"


def collate_samples(samples: Sequence[Any]) -> Any:
    """Collates samples as torch's `default_collate` does; also data classes.

    A batch of data classes is one of the same class, with each field collated. A field that is
    None in every sample stays None.
    """
    first = samples[0]
    if not _holds_data_class(first):
        return default_collate(list(samples))
    if is_dataclass(first):
        if any(type(sample) is not type(first) for sample in samples):
            raise TypeError("the samples are of different classes")
        return replace(
            first,
            **{  # type: ignore[type-var]
                f.name: _collate_entry([getattr(sample, f.name) for sample in samples])
                for f in fields(first)
                if f.init
            },
        )
    if isinstance(first, Mapping):
        return {key: collate_samples([sample[key] for sample in samples]) for key in first}
    entries = [collate_samples(entry) for entry in zip(*samples, strict=True)]
    return type(first)(*entries) if hasattr(first, "_fields") else type(first)(entries)


def _collate_entry(values: Sequence[Any]) -> Any:
    return None if all(value is None for value in values) else collate_samples(values)


def _holds_data_class(sample: Any) -> bool:
    if is_dataclass(sample) and not isinstance(sample, type):
        return True
    if isinstance(sample, Mapping):
        return any(map(_holds_data_class, sample.values()))
    return isinstance(sample, (tuple, list)) and any(map(_holds_data_class, sample))


@dataclass(frozen=True)
class PaddingCollate:
    """Pads the first dimension of token sequences to the longest of the batch.

    Samples are mappings. Every value of the same type and length as `length_key` is padded: labels
    with -100, masks with 0, `length_key` with `pad_id`, others with 0. Everything else is stacked.
    else is stacked. The batch always holds `attention_mask` (1 where a token is real): that of the
    samples, or else one of the padding alone. Samples without a target (`labels`, `label`,
    `targets`, `target` or `y`) are given `labels` aligned with the tokens: the tokens themselves,
    and -100 where the mask is 0 and, with `document_ids`, at the first token of each document.

    Args:
        pad_id: padding token.
        multiple_of: pad to a multiple of this length; compiled models benefit from few shapes.
        length_key: key of the tokens.
        add_labels: give token labels to samples without a target.

    >>> batch = PaddingCollate(pad_id=9)([{"input_ids": [1, 2, 3]}, {"input_ids": [4]}])
    >>> batch["input_ids"].tolist(), batch["labels"].tolist()
    ([[1, 2, 3], [4, 9, 9]], [[1, 2, 3], [4, -100, -100]])
    """

    pad_id: int = 0
    multiple_of: int = 1
    length_key: str = "input_ids"
    add_labels: bool = True

    def __call__(self, samples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """The batch: padded values [B, longest, …], others stacked.

        Raises:
            DataError: the samples are no mappings, lack the tokens or have different keys, or
                their mask is not as long as their tokens.
        """
        keys = self._keys(samples)
        lengths = [len(sample[self.length_key]) for sample in samples]
        _check_masks(samples, self.length_key, lengths)
        longest = -(-max(lengths) // self.multiple_of) * self.multiple_of
        batch: dict[str, Any] = {}
        for key in keys:
            values = [sample[key] for sample in samples]
            if all(
                _is_sequence(value) and len(value) == length
                for value, length in zip(values, lengths, strict=True)
            ):
                batch[key] = _padded(values, longest, self._filler(key))
            else:
                batch[key] = default_collate(values)
        positions = torch.arange(longest)
        real = positions < torch.tensor(lengths)[:, None]
        batch.setdefault(MASK_KEY, real.long())
        if self.add_labels and not any(name in batch for name in TARGET_NAMES):
            counts = real & (batch[MASK_KEY] != 0)
            batch["labels"] = labels_of_tokens(
                batch[self.length_key], counts, batch.get(DOCUMENTS_KEY)
            )
        return batch

    def _keys(self, samples: Sequence[Mapping[str, Any]]) -> list[str]:
        for sample in samples:
            if not isinstance(sample, Mapping) or self.length_key not in sample:
                raise DataError(
                    f"a sample is {describe(sample)}",
                    rule=f"each sample is a mapping with {self.length_key!r}",
                    remedy="return a dict from the dataset, or set length_key to its key of tokens",
                )
        keys = list(samples[0])
        for sample in samples[1:]:
            if set(sample) != set(keys):
                raise DataError(
                    f"samples have different keys: {sorted(keys)} and {sorted(sample)}",
                    rule="the samples of a micro-batch have equal keys",
                )
        return keys

    def _filler(self, key: str) -> int:
        if key == self.length_key:
            return self.pad_id
        return IGNORE_INDEX if "label" in key or "target" in key else 0


def labels_of_tokens(tokens: Tensor, counts: Tensor | None, documents: Tensor | None) -> Tensor:
    """The tokens as their own labels, aligned with them.

    Args:
        tokens: [B, S].
        counts: [B, S], true where a token may be a target; None for all.
        documents: [B, S], the document of each token; no token of one predicts the next one's.
    """
    labels = tokens if counts is None else tokens.masked_fill(~counts, IGNORE_INDEX)
    if documents is None:
        return labels
    starts = torch.zeros_like(documents, dtype=torch.bool)
    starts[:, 1:] = documents[:, 1:] != documents[:, :-1]
    return labels.masked_fill(starts, IGNORE_INDEX)


def _check_masks(
    samples: Sequence[Mapping[str, Any]], length_key: str, lengths: Sequence[int]
) -> None:
    for position, (sample, length) in enumerate(zip(samples, lengths, strict=True)):
        mask = sample.get(MASK_KEY)
        if mask is not None and not (_is_sequence(mask) and len(mask) == length):
            error = DataError(
                f"{MASK_KEY} is {describe(mask)} beside {length} tokens in {length_key!r}",
                rule="a mask says of each token of its sample whether it is real",
                remedy="give one entry for each token, or leave the mask out",
            )
            error.batch_position = position
            raise error


def _is_sequence(value: Any) -> bool:
    if isinstance(value, (Tensor, np.ndarray)):
        return value.ndim >= 1
    return isinstance(value, (list, tuple)) and all(isinstance(x, (int, float)) for x in value)


def _padded(values: Sequence[Any], longest: int, filler: int) -> Tensor:
    tensors = [torch.as_tensor(value) for value in values]
    first = tensors[0]
    out = first.new_full((len(tensors), longest, *first.shape[1:]), filler)
    for row, tensor in zip(out, tensors, strict=True):
        row[: len(tensor)] = tensor
    return out


def padding_fraction(batch: Mapping[str, Any]) -> float:
    """Share of padding among the positions of a batch."""
    mask = batch[MASK_KEY]
    return float((mask.numel() - int(mask.sum())) / mask.numel())
