"""From text to packs: nothing lost, twice or across borders; and cached by content."""

from __future__ import annotations

import json
import pickle
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from surefoot.core.errors import DataError, MissingDataError, RequestError
from surefoot.data.cache import cached_folder, default_cache_dir
from surefoot.data.sources import text as text_module
from surefoot.data.sources.text import TokenSource, open_text
from surefoot.data.sources.tokenizer import END_OF_TEXT, TextTokenizer
from surefoot.data.sources.tokens import TokenShard, open_shard, verify_shard, write_shard
from surefoot.tasks.generation import GenerationTask

END = 299


def shard_of(folder: Path, documents: list[list[int]], vocabulary_size: int = 300) -> TokenShard:
    folder.mkdir(exist_ok=True)
    for file in folder.iterdir():
        file.unlink()
    write_shard(folder, documents, vocabulary_size=vocabulary_size, end_of_text=END)
    return open_shard(folder)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("corpus")
    for index in range(12):
        words = " ".join(f"word{(index * 7 + i) % 13} \u00e9\U0001f600" for i in range(40))
        (root / f"{index:02}.txt").write_text(f"{words}\nfile {index}\n", encoding="utf-8")
    return root


def opened(corpus: Path, cache: Path, **options: Any) -> text_module.TextData:
    return open_text(
        "files",
        path=corpus,
        cache_dir=cache,
        **{"vocabulary_size": 300, "sequence_length": 16, "validation_fraction": 0.3, **options},
    )


def test_every_byte_comes_back(corpus: Path, tmp_path: Path) -> None:
    data = opened(corpus, tmp_path)
    for part in (data.splits.train, data.splits.validation["validation"]):
        shard = part.shard
        texts = [
            data.tokenizer.decode(shard.tokens[a:b])
            for a, b in zip(shard.borders[:-1], shard.borders[1:], strict=True)
        ]
        assert all(text.startswith("word") and text.endswith("\n") for text in texts)
        assert shard.tokens.dtype == np.uint16
        ends = shard.tokens[shard.borders[1:] - 1]
        assert (ends == data.tokenizer.end_of_text).all()
        tokens = torch.from_numpy(shard.tokens.astype(np.int64))
        num_bytes = int(data.bytes_per_token[tokens].sum())
        assert num_bytes == sum(len(text.encode()) for text in texts)
    facts = data.splits.facts
    assert facts["train"]["files"] + facts["validation"]["files"] == 12
    assert json.loads(json.dumps(facts)) == facts
    # So little text has fewer pieces than were asked for.
    size = data.tokenizer.vocabulary_size
    assert 257 < size < 300 and data.bytes_per_token.shape == (size,)
    assert data.splits.sizes == {"vocabulary_size": size, "sequence_length": 16}


def test_the_tokenizer_sees_no_validation_text(corpus: Path, tmp_path: Path) -> None:
    data = opened(corpus, tmp_path / "cache")
    held_out = data.splits.facts["validation"]["files"]
    other = tmp_path / "other"
    other.mkdir()
    train_names = []
    changed = 0
    from surefoot.data.sources.text_files import read_corpus

    read = read_corpus("files", path=corpus, validation_fraction=0.3)
    for document in (*read.train, *read.validation):
        text = document.text
        if document in read.validation:
            text = "zyx " * 50 + document.name
            changed += 1
        else:
            train_names.append(document.name)
        (other / document.name).write_text(text, encoding="utf-8")
    assert changed == held_out > 0 and train_names
    assert opened(other, tmp_path / "new").tokenizer.definition == data.tokenizer.definition


def test_the_second_time_nothing_is_made(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = opened(corpus, tmp_path)
    entries = sorted(path.name for path in tmp_path.iterdir())
    assert len(entries) == 3
    monkeypatch.setattr(TextTokenizer, "train", None)
    monkeypatch.setattr(text_module, "write_shard", None)
    second = opened(corpus, tmp_path)
    assert second.splits.train.fingerprint() == first.splits.train.fingerprint()
    assert second.tokenizer.definition == first.tokenizer.definition
    assert sorted(path.name for path in tmp_path.iterdir()) == entries
    # Another length of sequence needs no new tokens, and has another fingerprint.
    longer = opened(corpus, tmp_path, sequence_length=32)
    assert longer.splits.train.fingerprint() != first.splits.train.fingerprint()
    assert sorted(path.name for path in tmp_path.iterdir()) == entries


def test_another_vocabulary_is_another_tokenizer(corpus: Path, tmp_path: Path) -> None:
    sizes = [
        opened(corpus, tmp_path, vocabulary_size=size).tokenizer.vocabulary_size
        for size in (300, 260, 300)
    ]
    assert sizes[1] == 260 and sizes[0] == sizes[2] > 260


def test_changed_text_is_new_data(corpus: Path, tmp_path: Path) -> None:
    first = opened(corpus, tmp_path / "cache")
    copy = tmp_path / "copy"
    copy.mkdir()
    for path in corpus.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    same = opened(copy, tmp_path / "cache")
    assert same.splits.train.fingerprint() == first.splits.train.fingerprint()
    (copy / "00.txt").write_text((copy / "00.txt").read_text(encoding="utf-8") + "!", "utf-8")
    changed = opened(copy, tmp_path / "cache")
    prints = [
        data.splits.train.fingerprint() + data.splits.validation["validation"].fingerprint()
        for data in (first, changed)
    ]
    assert prints[0] != prints[1]


def test_training_is_repeatable() -> None:
    texts = ["the cat sat on the mat " * 10, "a cat is a cat"]
    assert TextTokenizer.train(texts, 280).definition == TextTokenizer.train(texts, 280).definition


@given(st.text(), st.text())
@settings(max_examples=100, deadline=None)
def test_any_text_survives_the_tokenizer(first: str, second: str) -> None:
    tokenizer = TOKENIZER
    for text in (first, second):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert int(tokenizer.bytes_per_token()[ids].sum()) == len(text.encode())
    assert tokenizer.encode_many([first, second]) == [
        tokenizer.encode(first),
        tokenizer.encode(second),
    ]


TOKENIZER = TextTokenizer.train(["hello world, hello there \u00e9\u00e9"] * 5, 290)


def test_text_that_spells_the_end_of_a_document_is_text() -> None:
    ids = TOKENIZER.encode(f"a{END_OF_TEXT}b")
    assert TOKENIZER.end_of_text not in ids
    assert TOKENIZER.decode(ids) == f"a{END_OF_TEXT}b"
    assert TOKENIZER.bytes_per_token()[TOKENIZER.end_of_text] == 0
    assert TOKENIZER.decode([*TOKENIZER.encode("a"), TOKENIZER.end_of_text]) == "a"


def test_a_tokenizer_is_kept_and_sent_as_text(tmp_path: Path) -> None:
    TOKENIZER.save(tmp_path / "tokenizer.json")
    loaded = TextTokenizer.load(tmp_path / "tokenizer.json")
    assert loaded.fingerprint == TOKENIZER.fingerprint
    assert loaded.vocabulary_size == TOKENIZER.vocabulary_size
    assert loaded.encode(f"hello{END_OF_TEXT}") == TOKENIZER.encode(f"hello{END_OF_TEXT}")
    assert pickle.loads(pickle.dumps(TOKENIZER)).definition == TOKENIZER.definition


def test_what_is_no_tokenizer_is_refused() -> None:
    with pytest.raises(DataError, match="cannot be read"):
        TextTokenizer("{}")
    with pytest.raises(DataError, match="has no token"):
        TextTokenizer(TOKENIZER.definition.replace(END_OF_TEXT, "<|other|>"))
    with pytest.raises(RequestError, match="vocabulary of 256"):
        TextTokenizer.train(["x"], 256)
    assert TextTokenizer.train(["x"], 257).vocabulary_size == 257


@given(
    st.lists(st.lists(st.integers(0, 298), max_size=20), min_size=1, max_size=8),
    st.integers(2, 9),
)
@settings(max_examples=80, deadline=None)
def test_every_token_is_predicted_once(
    tmp_path_factory: pytest.TempPathFactory, documents: list[list[int]], length: int
) -> None:
    shard = shard_of(tmp_path_factory.getbasetemp() / "shard", documents)
    flat = [token for document in documents for token in (*document, END)]
    if len(flat) < 2:
        return
    assert shard.tokens.tolist() == flat
    task = GenerationTask(vocabulary_size=300)

    joined = TokenSource(shard, length)
    batch = joined.batch(np.arange(len(joined)))
    labels = batch["labels"][:, 1:]
    assert labels[labels != -100].tolist() == flat[1:]
    assert task.weight(batch) == len(flat) - 1 == joined.num_targets
    assert set(batch) == {"input_ids", "labels"}

    separate = TokenSource(shard, length, "separate")
    batch = separate.batch(np.arange(len(separate)))
    labels = batch["labels"][:, 1:]
    expected = [token for document in documents for token in (*document, END)[1:]]
    assert labels[labels != -100].tolist() == expected
    assert task.weight(batch) == len(expected) == separate.num_targets
    owner = np.repeat(np.arange(len(documents)), [len(document) + 1 for document in documents])
    for pack in range(len(separate)):
        row = {key: value.tolist() for key, value in separate[pack].items()}
        start = pack * (length - 1)
        held = owner[start : start + length].tolist()
        # Documents are told apart just as in the text; padding belongs to none of them.
        ids = row["document_ids"]
        for a in range(length):
            for b in range(length):
                same = (held[a] if a < len(held) else -1) == (held[b] if b < len(held) else -1)
                assert (ids[a] == ids[b]) == same
        for place in range(len(held)):
            new = place == 0 or held[place] != held[place - 1]
            assert row["position_ids"][place] == (0 if new else row["position_ids"][place - 1] + 1)
        assert ids[0] == 0


def test_a_pack_by_hand(tmp_path: Path) -> None:
    shard = shard_of(tmp_path / "s", [[1, 2], [3, 4, 5]])
    source = TokenSource(shard, 4, "separate", "hand")
    assert len(source) == 2
    batch = source.batch(np.array([1, 0]))
    assert batch["input_ids"].tolist() == [[3, 4, 5, END], [1, 2, END, 3]]
    assert batch["labels"].tolist() == [[-100, 4, 5, END], [-100, 2, END, -100]]
    assert batch["document_ids"].tolist() == [[0, 0, 0, 0], [0, 0, 0, 1]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 3], [0, 1, 2, 0]]
    joined = TokenSource(shard, 5)
    assert joined.batch(np.array([1]))["labels"].tolist() == [[4, 5, END, -100, -100]]
    stacked = source.collate([source[0], source[1]])
    assert stacked["input_ids"].tolist() == [[1, 2, END, 3], [3, 4, 5, END]]


def test_wide_vocabularies_take_four_bytes(tmp_path: Path) -> None:
    shard = shard_of(tmp_path / "s", [[70_000, 1]], vocabulary_size=70_001)
    assert shard.tokens.dtype == np.uint32 and shard.tokens.tolist() == [70_000, 1, END]
    assert shard_of(tmp_path / "s", [[65_535]], 65_536).tokens.dtype == np.uint16
    with pytest.raises(DataError, match="outside the vocabulary"):
        shard_of(tmp_path / "s", [[300]])


def test_a_shard_travels_by_its_path(tmp_path: Path) -> None:
    shard = shard_of(tmp_path / "s", [[1] * 50_000])
    source = TokenSource(shard, 8)
    data = pickle.dumps(source)
    assert len(data) < 2_000
    assert pickle.loads(data).fingerprint() == source.fingerprint()


def test_a_damaged_shard_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "s"
    shard_of(folder, [[1, 2, 3]])
    tokens = folder / "tokens.bin"
    content = tokens.read_bytes()
    tokens.write_bytes(content[:-1])
    with pytest.raises(DataError, match=r"is damaged: tokens\.bin has 7 bytes"):
        open_shard(folder)
    tokens.write_bytes(bytes([content[0] ^ 1]) + content[1:])
    with pytest.raises(DataError, match="has changed since it was written"):
        verify_shard(open_shard(folder))
    index = json.loads((folder / "index.json").read_text())
    (folder / "index.json").write_text(json.dumps({**index, "format": 99}))
    with pytest.raises(DataError, match="has format 99"):
        open_shard(folder)
    (folder / "index.json").write_text("{")
    with pytest.raises(DataError, match="cannot be read"):
        open_shard(folder)
    with pytest.raises(DataError, match="cannot be read"):
        open_shard(tmp_path / "nothing")


def test_a_damaged_cache_is_found_when_it_is_opened(corpus: Path, tmp_path: Path) -> None:
    opened(corpus, tmp_path)
    victim = next(tmp_path.glob("tokens-*/tokens.bin"))
    content = bytearray(victim.read_bytes())
    content[10] ^= 1
    victim.write_bytes(content)
    with pytest.raises(DataError, match="has changed since it was written"):
        opened(corpus, tmp_path)


def test_too_little_text_is_refused(tmp_path: Path) -> None:
    shard = shard_of(tmp_path / "s", [[]])
    with pytest.raises(MissingDataError, match="holds 1 token"):
        TokenSource(shard, 4)
    with pytest.raises(RequestError, match="sequence_length is 1"):
        TokenSource(shard_of(tmp_path / "s", [[1, 2]]), 1)


def test_fingerprints_follow_tokens_and_packing(tmp_path: Path) -> None:
    def fingerprint(documents: list[list[int]], *arguments: Any) -> str:
        return TokenSource(shard_of(tmp_path / "s", documents), *arguments).fingerprint()

    prints = [
        fingerprint([[1, 2], [3]], 4),
        fingerprint([[1, 2], [3]], 5),
        fingerprint([[1, 2], [3]], 4, "separate"),
        fingerprint([[1, 2], [4]], 4),
        fingerprint([[1, 2, END, 3]], 4),
    ]
    assert len(set(prints)) == 5
    assert fingerprint([[1, 2], [3]], 4) == prints[0]


def test_the_cache_is_where_it_is_expected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert default_cache_dir() == Path("/somewhere/surefoot")
    for value in ("", "relative"):
        monkeypatch.setenv("XDG_CACHE_HOME", value)
        assert default_cache_dir() == Path.home() / ".cache" / "surefoot"


def test_an_entry_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    def half(folder: Path) -> None:
        (folder / "part").write_text("x")
        assert not (tmp_path / "entry").exists()
        raise RuntimeError("killed")

    with pytest.raises(RuntimeError):
        cached_folder(tmp_path, "entry", half)
    assert list(tmp_path.iterdir()) == []
    made = cached_folder(tmp_path, "entry", lambda folder: (folder / "a").touch() or None)
    assert (made / "a").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["entry"]


def test_two_makers_of_one_entry_agree(tmp_path: Path) -> None:
    barrier = threading.Barrier(2)
    found: list[Path] = []

    def build(folder: Path) -> None:
        barrier.wait(20)
        (folder / "a").touch()

    def make() -> None:
        found.append(cached_folder(tmp_path, "entry", build))

    threads = [threading.Thread(target=make) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [tmp_path / "entry"] * 2
    assert [path.name for path in tmp_path.iterdir()] == ["entry"]


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(
        DataError, match="could not be written to the cache: Not a directory"
    ) as caught:
        cached_folder(tmp_path / "file", "entry", lambda folder: None)
    assert "XDG_CACHE_HOME" in caught.value.remedy
