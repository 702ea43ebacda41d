"""Token shards on disk: a flat array of ids and its document boundaries.

Memory-mapped, so that a corpus larger than memory opens instantly. Written once, never changed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from surefoot.core.errors import DataError

_FORMAT = 1
_TOKENS = "tokens.bin"
_BORDERS = "borders.npy"
_INDEX = "index.json"


@dataclass(frozen=True)
class TokenShard:
    """A memory-mapped shard."""

    folder: Path
    tokens: npt.NDArray[Any]
    """uint16 or uint32 [tokens]; each document ends with the end-of-text token."""
    borders: npt.NDArray[np.int64]
    """[documents + 1]; document d is `tokens[borders[d]:borders[d + 1]]`."""
    fingerprint: str

    def __reduce__(self) -> tuple[Any, ...]:
        # A spawned worker maps the file again; the tokens are not sent.
        return open_shard, (self.folder,)


def write_shard(
    folder: Path, documents: Iterable[Iterable[int]], *, vocabulary_size: int, end_of_text: int
) -> None:
    """Writes documents, each followed by `end_of_text`, into an empty folder.

    Args:
        folder: exists and is empty.
        documents: token ids of each document; streamed, never all in memory.
        vocabulary_size: ids are below it; up to 65,536 they take two bytes.
        end_of_text: id of the token that ends a document.
    """
    dtype = np.dtype("<u2" if vocabulary_size <= 1 << 16 else "<u4")
    digest = hashlib.blake2b(digest_size=16)
    borders = [0]
    with open(folder / _TOKENS, "wb") as file:
        for document in documents:
            ids = np.fromiter((*document, end_of_text), dtype=np.int64)
            if ids.min() < 0 or ids.max() >= vocabulary_size:
                raise DataError(
                    f"document {len(borders) - 1} holds a token id outside the vocabulary",
                    rule=f"0 <= id < {vocabulary_size}",
                )
            data = ids.astype(dtype).tobytes()
            digest.update(data)
            file.write(data)
            borders.append(borders[-1] + ids.size)
    border_array = np.array(borders, dtype=np.int64)
    digest.update(border_array.tobytes())
    np.save(folder / _BORDERS, border_array, allow_pickle=False)
    index = {
        "format": _FORMAT,
        "dtype": dtype.str,
        "num_tokens": borders[-1],
        "num_documents": len(borders) - 1,
        "vocabulary_size": vocabulary_size,
        "end_of_text": end_of_text,
        "hash": digest.hexdigest(),
    }
    (folder / _INDEX).write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")


def open_shard(folder: Path | str) -> TokenShard:
    """Maps a shard that `write_shard` wrote.

    Raises:
        DataError: it is damaged or has another format; names the file.
    """
    folder = Path(folder)
    try:
        index = json.loads((folder / _INDEX).read_text(encoding="utf-8"))
        if index["format"] != _FORMAT:
            raise DataError(
                f"the token shard {folder} has format {index['format']}",
                rule=f"this version reads format {_FORMAT}",
                remedy="delete the folder; it will be created again",
            )
        borders = np.load(folder / _BORDERS, allow_pickle=False)
        dtype = np.dtype(index["dtype"])
        size = (folder / _TOKENS).stat().st_size
        whole = size == index["num_tokens"] * dtype.itemsize and (
            borders.shape == (index["num_documents"] + 1,) and borders[-1] == index["num_tokens"]
        )
        if not whole:
            raise DataError(
                f"the token shard {folder} is damaged: {_TOKENS} has {size} bytes",
                rule=f"{index['num_tokens']} tokens of {dtype.itemsize} bytes",
                remedy="delete the folder; it will be created again",
            )
        if index["num_tokens"]:
            tokens: npt.NDArray[Any] = np.memmap(folder / _TOKENS, dtype=dtype, mode="r")
        else:
            tokens = np.empty(0, dtype=dtype)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"the token shard {folder} cannot be read: {error}",
            where=str(folder),
            rule="a shard consists of tokens, borders and an index",
            remedy="delete the folder; it will be created again",
        ) from error
    return TokenShard(folder, tokens, borders, index["hash"])


def verify_shard(shard: TokenShard) -> None:
    """Reads all of a shard and compares its hash.

    Raises:
        DataError: the content differs from what was written.
    """
    digest = hashlib.blake2b(digest_size=16)
    for start in range(0, shard.tokens.size, 1 << 24):
        digest.update(shard.tokens[start : start + (1 << 24)].tobytes())
    digest.update(shard.borders.tobytes())
    if digest.hexdigest() != shard.fingerprint:
        raise DataError(
            f"the token shard {shard.folder} has changed since it was written",
            where=str(shard.folder),
            rule="its content has the hash stored in its index",
            remedy="delete the folder; it will be created again",
        )
