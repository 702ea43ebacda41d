"""Text for next-token training: from files to tokens to packs of equal length.

Everything is planned once: tokenizer and tokens are cached by the hash of their text, and a pack is
a function of its index. Shifts no labels; the task does.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from surefoot.core.errors import MissingDataError, RequestError
from surefoot.data.cache import cached_folder, default_cache_dir
from surefoot.data.order import IndexArray
from surefoot.data.sources.base import DataSplits, hash_parts
from surefoot.data.sources.text_files import EncodingErrors, TextCorpus, TextDocument, read_corpus
from surefoot.data.sources.tokenizer import TextTokenizer
from surefoot.data.sources.tokens import TokenShard, open_shard, verify_shard, write_shard

Documents = Literal["joined", "separate"]

IGNORE_INDEX = -100
_TOKENIZER = "tokenizer.json"
# Increased when the way from text to tokens changes, so that old cache entries are not used.
_RECIPE = "1"
# Texts encoded at once: enough for all cores, with little memory.
_ENCODE_CHUNK = 64


class TokenSource:
    """Packs of `sequence_length` tokens from a shard.

    Pack k starts at token k × (sequence_length - 1): neighbours share one token, so that each token
    but the first is predicted exactly once. The end of the last pack is padded, with label -100.

    A batch is a dict of int64 tensors [B, S]: `input_ids`, `labels` (aligned, not shifted) and,
    with separate documents, `document_ids` (from 0 in each pack; padding counts as a document) and
    `position_ids` (from 0 in each document).

    Args:
        shard: the tokens.
        sequence_length: S, at least 2.
        documents: `joined`: attention and targets cross document boundaries. `separate`: they do
            not; the first token of a document is not a target.
        name: used in messages.

    Raises:
        MissingDataError: the shard holds fewer than two tokens.
        RequestError: `sequence_length` is below 2.
    """

    is_random = False

    def __init__(
        self,
        shard: TokenShard,
        sequence_length: int,
        documents: Documents = "joined",
        name: str = "text",
    ) -> None:
        if sequence_length < 2:
            raise RequestError(
                f"sequence_length is {sequence_length}",
                where="data.sequence_length",
                rule="at least 2 tokens: one to read and one to predict",
            )
        if shard.tokens.size < 2:
            raise MissingDataError(
                f"{name} holds {shard.tokens.size} token(s)", rule="at least two tokens"
            )
        self.shard = shard
        self.sequence_length = sequence_length
        self.documents = documents
        self.name = name
        self._stride = sequence_length - 1
        self._offsets = np.arange(sequence_length, dtype=np.int64)

    def __len__(self) -> int:
        return -(-(self.shard.tokens.size - 1) // self._stride)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        batch = self.batch(np.array([index], dtype=np.int64))
        return {key: value[0] for key, value in batch.items()}

    def batch(self, indices: IndexArray) -> dict[str, torch.Tensor]:
        """The packs with these indices."""
        tokens = self.shard.tokens
        places = (indices * self._stride)[:, None] + self._offsets
        last = tokens.size - 1
        beyond = places > last
        padded = bool(beyond.any())
        input_ids = tokens[np.minimum(places, last) if padded else places].astype(np.int64)
        labels = input_ids.copy()
        if padded:
            labels[beyond] = IGNORE_INDEX
        batch = {"input_ids": torch.from_numpy(input_ids), "labels": torch.from_numpy(labels)}
        if self.documents == "separate":
            document_ids, position_ids = self._documents_of(places, beyond, labels)
            batch["document_ids"] = torch.from_numpy(document_ids)
            batch["position_ids"] = torch.from_numpy(position_ids)
        return batch

    def collate(self, samples: Sequence[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        """Stacks packs."""
        return {key: torch.stack([sample[key] for sample in samples]) for key in samples[0]}

    def fingerprint(self) -> str:
        """Hash of the tokens, their document boundaries and the packing."""
        plan = f"{self.sequence_length}:{self._stride}:{self.documents}"
        return f"content:{hash_parts(self.shard.fingerprint, plan)}"

    @property
    def num_targets(self) -> int:
        """Number of tokens that one pass over all packs predicts."""
        if self.documents == "joined":
            return int(self.shard.tokens.size) - 1
        # The first token of a document is not a target; the very first token never is.
        return int(self.shard.tokens.size) - (self.shard.borders.size - 1)

    def _documents_of(
        self, places: IndexArray, beyond: npt.NDArray[np.bool_], labels: IndexArray
    ) -> tuple[IndexArray, IndexArray]:
        borders = self.shard.borders
        owner = np.searchsorted(borders, places, side="right") - 1
        # Padding comes after the last boundary: searchsorted gives it an id of its own.
        start = np.maximum(borders[owner], places[:, :1])
        position_ids = np.where(beyond, 0, places - start)
        document_ids = owner - owner[:, :1]
        labels[(places == borders[owner]) & ~beyond] = IGNORE_INDEX
        return document_ids, position_ids


@dataclass(frozen=True)
class TextData:
    """A tokenized corpus."""

    splits: DataSplits
    tokenizer: TextTokenizer
    bytes_per_token: torch.Tensor
    """int64 [vocabulary]: UTF-8 bytes of each token, for bits per byte."""


def open_text(
    source: Literal["stdlib", "files"] = "stdlib",
    *,
    path: Path | str | None = None,
    pattern: str = "**/*.txt",
    encoding_errors: EncodingErrors = "stop",
    vocabulary_size: int = 4096,
    sequence_length: int = 256,
    documents: Documents = "joined",
    validation_fraction: float = 0.1,
    cache_dir: Path | str | None = None,
) -> TextData:
    """Read, tokenise and pack a corpus; what was prepared before is taken from the cache.

    Args:
        source, path, pattern, encoding_errors, validation_fraction: see `read_corpus`.
        vocabulary_size: largest number of tokens of the tokenizer, at least 257.
        sequence_length: number of tokens of a pack.
        documents: see `TokenSource`.
        cache_dir: for tokenizer and tokens; default: `default_cache_dir()`.

    Raises:
        MissingDataError: there is no text.
        DataError: a file is not UTF-8, or the cache cannot be used.
        RequestError: an argument is out of range.
    """
    corpus = read_corpus(
        source,
        path=path,
        pattern=pattern,
        encoding_errors=encoding_errors,
        validation_fraction=validation_fraction,
    )
    cache = Path(cache_dir) if cache_dir is not None else default_cache_dir()
    tokenizer = _tokenizer_of(corpus, vocabulary_size, cache)
    table = tokenizer.bytes_per_token()
    train = _source_of(corpus, "train", tokenizer, sequence_length, documents, cache)
    validation = {}
    if corpus.validation:
        validation["validation"] = _source_of(
            corpus, "validation", tokenizer, sequence_length, documents, cache
        )
    facts = _facts(corpus, train, validation, tokenizer)
    sizes = {"vocabulary_size": tokenizer.vocabulary_size, "sequence_length": sequence_length}
    splits = DataSplits(train, validation, sizes, facts)
    return TextData(splits, tokenizer, torch.from_numpy(table))


def _tokenizer_of(corpus: TextCorpus, vocabulary_size: int, cache: Path) -> TextTokenizer:
    import tokenizers

    key = hash_parts(
        _RECIPE, tokenizers.__version__, vocabulary_size, *(doc.text for doc in corpus.train)
    )

    def build(folder: Path) -> None:
        texts = (document.text for document in corpus.train)
        TextTokenizer.train(texts, vocabulary_size).save(folder / _TOKENIZER)

    folder = cached_folder(cache, f"tokenizer-{key}", build)
    return TextTokenizer.load(folder / _TOKENIZER)


def _source_of(
    corpus: TextCorpus,
    part: Literal["train", "validation"],
    tokenizer: TextTokenizer,
    sequence_length: int,
    documents: Documents,
    cache: Path,
) -> TokenSource:
    texts: tuple[TextDocument, ...] = getattr(corpus, part)
    key = hash_parts(_RECIPE, tokenizer.fingerprint, *(document.text for document in texts))

    def encoded() -> Iterator[list[int]]:
        for start in range(0, len(texts), _ENCODE_CHUNK):
            chunk = texts[start : start + _ENCODE_CHUNK]
            yield from tokenizer.encode_many([document.text for document in chunk])

    def build(folder: Path) -> None:
        write_shard(
            folder,
            encoded(),
            vocabulary_size=tokenizer.vocabulary_size,
            end_of_text=tokenizer.end_of_text,
        )

    shard = open_shard(cached_folder(cache, f"tokens-{key}", build))
    verify_shard(shard)
    return TokenSource(shard, sequence_length, documents, f"{corpus.name} {part}")


def _facts(
    corpus: TextCorpus,
    train: TokenSource,
    validation: dict[str, TokenSource],
    tokenizer: TextTokenizer,
) -> dict[str, Any]:
    def size(documents: tuple[TextDocument, ...]) -> int:
        return sum(len(document.text.encode("utf-8")) for document in documents)

    return {
        "source": corpus.name,
        "split_rule": corpus.split_rule,
        "vocabulary_size": tokenizer.vocabulary_size,
        "tokenizer": tokenizer.fingerprint,
        "train": {
            "files": len(corpus.train),
            "bytes": size(corpus.train),
            "tokens": int(train.shard.tokens.size),
            "packs": len(train),
            "fingerprint": train.fingerprint(),
        },
        **{
            name: {
                "files": len(corpus.validation),
                "bytes": size(corpus.validation),
                "tokens": int(part.shard.tokens.size),
                "packs": len(part),
                "fingerprint": part.fingerprint(),
            }
            for name, part in validation.items()
        },
        "skipped": [{"name": entry.name, "reason": entry.reason} for entry in corpus.skipped],
    }
