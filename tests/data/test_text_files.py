"""Corpora: which files, which duplicates, which side; and what is wrong is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from surefoot.core.errors import DataError, MissingDataError, RequestError
from surefoot.data.sources.text_files import TextCorpus, read_corpus


def write(root: Path, **files: str | bytes) -> Path:
    for name, content in files.items():
        path = root / name.replace("__", "/").replace("_txt", ".txt")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return root


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write(
        tmp_path, **{f"part{i % 3}__file{i:02}_txt": f"text number {i}\n" for i in range(30)}
    )


def names(corpus: TextCorpus) -> tuple[set[str], set[str]]:
    return {doc.name for doc in corpus.train}, {doc.name for doc in corpus.validation}


def test_the_standard_library_is_read() -> None:
    corpus = read_corpus("stdlib")
    train, validation = names(corpus)
    everything = train | validation
    assert {"os.py", "json/decoder.py", "asyncio/tasks.py"} <= everything
    assert not any(
        part in name.split("/")
        for name in everything
        for part in ("test", "tests", "site-packages")
    )
    assert not train & validation
    size = sum(len(doc.text) for doc in (*corpus.train, *corpus.validation))
    assert size > 5_000_000
    held_out = sum(len(doc.text) for doc in corpus.validation)
    assert 0.02 < held_out / size < 0.3


def test_the_order_is_by_path_and_the_split_by_its_hash(folder: Path) -> None:
    corpus = read_corpus("files", path=folder, validation_fraction=0.3)
    train, validation = names(corpus)
    assert len(train) + len(validation) == 30 and not train & validation and validation
    assert [doc.name for doc in corpus.train] == sorted(train)
    assert corpus.split_rule == "files whose path hashes below 0.3"
    # The same wherever the folder lies, and whoever reads it.
    assert read_corpus("files", path=str(folder), validation_fraction=0.3) == corpus


def test_a_file_stays_on_its_side(folder: Path) -> None:
    before = names(read_corpus("files", path=folder, validation_fraction=0.3))[1]
    write(folder, **{f"more__{i}_txt": f"more {i}" for i in range(50)})
    after = names(read_corpus("files", path=folder, validation_fraction=0.3))[1]
    assert before <= after


def test_a_pattern_chooses_files(folder: Path) -> None:
    write(folder, notes__hello="no", part0__image="x", _hidden_txt="secret")
    (folder / ".git").mkdir()
    write(folder / ".git", x_txt="not this")
    corpus = read_corpus("files", path=folder, pattern="part0/*.txt", validation_fraction=0.0)
    assert len(corpus.train) == 10 and corpus.validation == ()
    everything = read_corpus("files", path=folder, pattern="**/*", validation_fraction=0.0)
    assert len(everything.train) == 33


def test_copies_are_left_out_and_listed(tmp_path: Path) -> None:
    write(
        tmp_path,
        a_txt="def f():\n    return 1\n",
        b_txt="def f():\r\n\treturn   1",
        c_txt="def f():\n    return 2\n",
        d_txt=" \n\t\n",
        e_txt="",
        z__a_txt="def f():\n    return 1\n",
    )
    corpus = read_corpus("files", path=tmp_path, validation_fraction=0.0)
    assert [doc.name for doc in corpus.train] == ["a.txt", "c.txt"]
    assert [(entry.name, entry.reason) for entry in corpus.skipped] == [
        ("b.txt", "equal to a.txt except for white space"),
        ("d.txt", "no text"),
        ("e.txt", "no text"),
        ("z/a.txt", "equal to a.txt except for white space"),
    ]


def test_a_file_that_is_not_utf8_is_named(folder: Path) -> None:
    write(folder, part1__bad_txt=b"abc\xff\xfe")
    with pytest.raises(DataError) as caught:
        read_corpus("files", path=folder)
    path = folder / "part1" / "bad.txt"
    assert caught.value.what == f"{path} is not UTF-8: invalid start byte at byte 3"
    assert caught.value.where == f"{path}, byte 3"
    assert "encoding_errors" in caught.value.remedy
    corpus = read_corpus("files", path=folder, encoding_errors="skip")
    assert len(corpus.train) + len(corpus.validation) == 30
    assert [(entry.name, entry.reason) for entry in corpus.skipped] == [
        ("part1/bad.txt", "not UTF-8: invalid start byte at byte 3")
    ]


def test_text_is_read_as_it_is(tmp_path: Path) -> None:
    text = "\ufeffline\r\nnext\x00 \u00e9 \U0001f600\r"
    write(tmp_path, a_txt=text)
    assert read_corpus("files", path=tmp_path, validation_fraction=0.0).train[0].text == text


@pytest.mark.parametrize("fraction", [1e-9, 0.999999])
def test_both_sides_get_a_file(folder: Path, fraction: float) -> None:
    corpus = read_corpus("files", path=folder, validation_fraction=fraction)
    smaller = min(len(corpus.train), len(corpus.validation))
    assert smaller == 1 and len(corpus.train) + len(corpus.validation) == 30
    assert "smallest hash" in corpus.split_rule or "largest hash" in corpus.split_rule


def test_a_single_file_is_cut_at_a_line(tmp_path: Path) -> None:
    text = "".join(f"line {i}\n" for i in range(100))
    write(tmp_path, book_txt=text)
    for path in (tmp_path / "book.txt", tmp_path):
        corpus = read_corpus("files", path=path, validation_fraction=0.1)
        (train,), (validation,) = corpus.train, corpus.validation
        assert train.text + validation.text == text
        assert validation.text.count("\n") == 10
        assert train.name == "book.txt[lines 1-90]"
        assert validation.name == "book.txt[lines 91-100]"
        assert corpus.split_rule == "the last 10.0% of the lines of the only file"
    write(tmp_path, book_txt="one line")
    with pytest.raises(DataError, match="cannot be split"):
        read_corpus("files", path=tmp_path)
    assert read_corpus("files", path=tmp_path, validation_fraction=0.0).validation == ()


def test_what_is_missing_or_empty_is_named(tmp_path: Path) -> None:
    with pytest.raises(MissingDataError, match=r"the file or folder .* does not exist") as caught:
        read_corpus("files", path=tmp_path / "nothing")
    assert caught.value.exit_code == 2
    with pytest.raises(MissingDataError, match=r"no file in .* matches '\*\*/\*.txt'"):
        read_corpus("files", path=tmp_path)
    write(tmp_path, a="x", b_txt=" ")
    with pytest.raises(MissingDataError, match=r"no file in .* matches") as caught:
        read_corpus("files", path=tmp_path, pattern="*.md")
    assert "has 2 file(s)" in caught.value.remedy
    with pytest.raises(MissingDataError, match=r"has no text \(b.txt: no text\)"):
        read_corpus("files", path=tmp_path)
    with pytest.raises(RequestError, match=r"data\.path is not set"):
        read_corpus("files")
    for fraction in (-0.1, 1.0):
        with pytest.raises(RequestError, match="validation_fraction"):
            read_corpus("files", path=tmp_path, validation_fraction=fraction)


def test_a_file_that_cannot_be_read_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, a_txt="x")

    def refuse(path: Path) -> bytes:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(DataError, match=r"a\.txt cannot be read: Permission denied"):
        read_corpus("files", path=tmp_path)
