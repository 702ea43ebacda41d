"""A byte-level BPE tokenizer, trained locally on the training documents.

Any UTF-8 text round-trips unchanged. Downloads nothing and reads no validation text.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from surefoot.core.errors import DataError, RequestError
from surefoot.data.sources.base import hash_parts

END_OF_TEXT = "<|endoftext|>"
SMALLEST_VOCABULARY = 257
"""256 bytes and the end-of-text token."""


class TextTokenizer:
    """Converts text to token ids and back.

    Args:
        definition: JSON of a `tokenizers` tokenizer with byte-level pieces.

    Raises:
        DataError: the definition is not such a tokenizer.
    """

    def __init__(self, definition: str) -> None:
        from tokenizers import Tokenizer

        self.definition = definition
        try:
            self._tokenizer: Any = Tokenizer.from_str(definition)
        except Exception as error:
            raise DataError(
                f"the tokenizer cannot be read: {error}",
                rule="a tokenizer is JSON as written by `tokenizers`",
                remedy="delete it from the cache; it will be trained again",
            ) from error
        # Text that spells a special token is plain text: only this class places document ends.
        self._tokenizer.encode_special_tokens = True
        end = self._tokenizer.token_to_id(END_OF_TEXT)
        if end is None:
            raise DataError(
                f"the tokenizer has no token {END_OF_TEXT}",
                rule="one token marks the end of a document",
            )
        self.end_of_text: int = end
        self.vocabulary_size: int = self._tokenizer.get_vocab_size()
        self.fingerprint = hash_parts(definition)

    @classmethod
    def train(cls, texts: Iterable[str], vocabulary_size: int) -> TextTokenizer:
        """Trains byte-level BPE with at most `vocabulary_size` tokens.

        Deterministic for the same texts in the same order.

        Raises:
            RequestError: the vocabulary is smaller than 257.
        """
        if vocabulary_size < SMALLEST_VOCABULARY:
            raise RequestError(
                f"a vocabulary of {vocabulary_size} is too small",
                where="data.vocabulary_size",
                rule=f"at least {SMALLEST_VOCABULARY}: every byte and the end of a document",
            )
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

        tokenizer: Any = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocabulary_size,
            special_tokens=[END_OF_TEXT],
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        )
        tokenizer.train_from_iterator(texts, trainer)
        return cls(tokenizer.to_str())

    @classmethod
    def load(cls, path: Path | str) -> TextTokenizer:
        """Reads what `save` wrote."""
        return cls(Path(path).read_text(encoding="utf-8"))

    def save(self, path: Path | str) -> None:
        """Writes the definition as JSON."""
        Path(path).write_text(self.definition, encoding="utf-8")

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, without the end-of-text token."""
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def encode_many(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of several texts, using all cores."""
        return [
            list(encoded.ids)
            for encoded in self._tokenizer.encode_batch(list(texts), add_special_tokens=False)
        ]

    def decode(self, ids: Iterable[int]) -> str:
        """Text of token ids; end-of-text tokens give no text, invalid UTF-8 gives U+FFFD."""
        return str(self._tokenizer.decode([int(token) for token in ids], skip_special_tokens=True))

    def bytes_per_token(self) -> npt.NDArray[np.int64]:
        """UTF-8 bytes of each token, int64 [vocabulary_size]; 0 for the end-of-text token.

        A byte-level piece represents each byte by one character.
        """
        table = np.zeros(self.vocabulary_size, dtype=np.int64)
        for token in range(self.vocabulary_size):
            piece = self._tokenizer.id_to_token(token)
            table[token] = 0 if token == self.end_of_text else len(piece)
        return table

    def __reduce__(self) -> tuple[Any, ...]:
        return TextTokenizer, (self.definition,)
