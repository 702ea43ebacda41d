"""Collects text files: finds, reads, removes duplicates, splits into training and validation.

Knows nothing of tokens. Every skipped file is listed with the reason.
"""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from surefoot.core.errors import DataError, MissingDataError, RequestError

EncodingErrors = Literal["stop", "skip"]

# Folders of the standard library that are not part of its source, or not always installed.
_STDLIB_LEFT_OUT = frozenset(
    {"test", "tests", "idlelib", "idle_test", "site-packages", "dist-packages", "__pycache__"}
)


@dataclass(frozen=True, slots=True)
class TextDocument:
    """One document of a corpus."""

    name: str
    """Path relative to the corpus folder, with forward slashes."""
    text: str


@dataclass(frozen=True, slots=True)
class SkippedFile:
    """A file that is not part of the corpus, and why."""

    name: str
    reason: str


@dataclass(frozen=True)
class TextCorpus:
    """Documents of a folder, without duplicates, split into training and validation."""

    name: str
    train: tuple[TextDocument, ...]
    validation: tuple[TextDocument, ...]
    skipped: tuple[SkippedFile, ...]
    split_rule: str
    """How the two parts were split, for the record."""


def read_corpus(
    source: Literal["stdlib", "files"] = "stdlib",
    *,
    path: Path | str | None = None,
    pattern: str = "**/*.txt",
    encoding_errors: EncodingErrors = "stop",
    validation_fraction: float = 0.1,
) -> TextCorpus:
    """Read, deduplicate and split a corpus.

    Two files are duplicates if they are equal after removing all white space; the first by path is
    kept. A file is held out for validation if the hash of its path is below `validation_fraction`,
    so it never changes sides when files are added. If none is, the file with the smallest hash is
    held out; a single file is split at a line boundary, and its end is for validation.

    Args:
        source: `stdlib` for the `.py` files of the running Python's standard library without its
            tests, or `files`.
        path: a file or a folder, for `files`.
        pattern: glob pattern of the files of the folder, such as `**/*.txt`.
        encoding_errors: for a file that is not UTF-8: `stop`, or `skip` and list it.
        validation_fraction: share of files for validation, in [0, 1).

    Raises:
        MissingDataError: the path is missing, or no file with text matches.
        DataError: a file is not UTF-8 or cannot be read.
        RequestError: the arguments do not fit together.
    """
    if not 0.0 <= validation_fraction < 1.0:
        raise RequestError(
            f"validation_fraction is {validation_fraction}",
            where="data.validation_fraction",
            rule="0 <= validation_fraction < 1",
        )
    root, files, name = _find(source, path, pattern)
    documents, skipped = _read(root, files, encoding_errors)
    if not documents:
        reasons = "; ".join(f"{entry.name}: {entry.reason}" for entry in skipped[:5])
        raise MissingDataError(
            f"{name} has no text" + (f" ({reasons})" if reasons else ""),
            where=str(path or root),
            rule="at least one file with text",
            remedy="check data.path and data.pattern",
        )
    train, validation, rule = _split(documents, validation_fraction)
    return TextCorpus(name, tuple(train), tuple(validation), tuple(skipped), rule)


def _find(source: str, path: Path | str | None, pattern: str) -> tuple[Path, list[Path], str]:
    if source == "stdlib":
        root = Path(sysconfig.get_paths()["stdlib"])
        files = [
            file
            for file in root.rglob("*.py")
            if not _STDLIB_LEFT_OUT.intersection(file.relative_to(root).parts)
        ]
        if not files:
            raise MissingDataError(
                "this Python has no source files of its standard library",
                where=str(root),
                rule="the source `stdlib` reads the .py files of the running Python",
                remedy="use a Python installed with its sources, or data.source: files",
            )
        return root, _sorted(root, files), "stdlib"
    if path is None:
        raise RequestError(
            "data.source is files, and data.path is not set",
            where="data.path",
            rule="the source `files` needs a path",
            remedy="set data.path to a file or folder",
        )
    root = Path(path).expanduser()
    if not root.exists():
        raise MissingDataError(
            f"the file or folder {path} does not exist",
            where="data.path",
            rule="data.path names a file or folder that exists",
            remedy=f"relative paths are resolved from the working directory, {Path.cwd()}",
        )
    if root.is_file():
        return root.parent, [root], root.name
    files = [
        file
        for file in root.glob(pattern)
        if file.is_file() and not any(part.startswith(".") for part in file.relative_to(root).parts)
    ]
    if not files:
        held = sum(1 for file in root.rglob("*") if file.is_file())
        raise MissingDataError(
            f"no file in {path} matches {pattern!r}",
            where="data.path, data.pattern",
            rule="at least one file with text",
            remedy=f"the folder has {held} file(s) in total; `**/*` matches all of them",
        )
    return root, _sorted(root, files), root.name


def _sorted(root: Path, files: Iterable[Path]) -> list[Path]:
    return sorted(files, key=lambda file: file.relative_to(root).as_posix())


def _read(
    root: Path, files: list[Path], encoding_errors: EncodingErrors
) -> tuple[list[TextDocument], list[SkippedFile]]:
    documents: list[TextDocument] = []
    skipped: list[SkippedFile] = []
    seen: dict[bytes, str] = {}
    for file in files:
        name = file.relative_to(root).as_posix()
        try:
            text = file.read_bytes().decode("utf-8")
        except UnicodeDecodeError as error:
            reason = f"not UTF-8: {error.reason} at byte {error.start}"
            if encoding_errors == "stop":
                raise DataError(
                    f"{file} is {reason}",
                    where=f"{file}, byte {error.start}",
                    rule="text files are UTF-8",
                    remedy="convert the file, or set data.encoding_errors to skip",
                ) from error
            skipped.append(SkippedFile(name, reason))
            continue
        except OSError as error:
            raise DataError(
                f"{file} cannot be read: {error.strerror}",
                where=str(file),
                rule="every file that matches data.pattern can be read",
            ) from error
        letters = "".join(text.split())
        if not letters:
            skipped.append(SkippedFile(name, "no text"))
            continue
        key = hashlib.blake2b(letters.encode("utf-8"), digest_size=16).digest()
        if key in seen:
            skipped.append(SkippedFile(name, f"equal to {seen[key]} except for white space"))
            continue
        seen[key] = name
        documents.append(TextDocument(name, text))
    return documents, skipped


def _split(
    documents: list[TextDocument], fraction: float
) -> tuple[list[TextDocument], list[TextDocument], str]:
    if fraction == 0.0:
        return documents, [], "no validation set"
    if len(documents) == 1:
        head, tail = _cut(documents[0], fraction)
        return [head], [tail], f"the last {fraction:.1%} of the lines of the only file"
    places = [_place(document.name) for document in documents]
    limit = fraction
    rule = f"files whose path hashes below {fraction:g}"
    if min(places) >= fraction:
        limit = sorted(places)[1]
        rule = f"the file whose path has the smallest hash, as none is below {fraction:g}"
    elif max(places) < fraction:
        limit = max(places)
        rule = f"all files but the one whose path has the largest hash, as all lie below {fraction}"
    train = [doc for doc, place in zip(documents, places, strict=True) if place >= limit]
    validation = [doc for doc, place in zip(documents, places, strict=True) if place < limit]
    return train, validation, rule


def _place(name: str) -> float:
    """Maps a path to [0, 1), the same on every machine."""
    digest = hashlib.blake2b(name.encode("utf-8", "surrogateescape"), digest_size=8).digest()
    # 53 bits are exact in a double and stay below 1.
    return (int.from_bytes(digest, "big") >> 11) / 2.0**53


def _cut(document: TextDocument, fraction: float) -> tuple[TextDocument, TextDocument]:
    lines = document.text.splitlines(keepends=True)
    if len(lines) < 2:
        raise DataError(
            f"{document.name} is a single line and cannot be split for validation",
            where="data.validation_fraction",
            rule="a single file is split at a line boundary",
            remedy="add a second file, or set data.validation_fraction to 0",
        )
    kept = min(len(lines) - 1, max(1, round(len(lines) * (1.0 - fraction))))
    return (
        TextDocument(f"{document.name}[lines 1-{kept}]", "".join(lines[:kept])),
        TextDocument(f"{document.name}[lines {kept + 1}-{len(lines)}]", "".join(lines[kept:])),
    )
