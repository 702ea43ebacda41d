"""Image folders: what is there, what is wrong, and which side each image is on."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from surefoot.core.errors import DataError, MissingDataError, RequestError
from surefoot.data.loader import Loader
from surefoot.data.order import IN_ORDER, BatchPlan
from surefoot.data.sources.images import open_image_folder

Image = pytest.importorskip("PIL.Image")


def draw(path: Path, value: int, size: tuple[int, int] = (12, 8), mode: str = "RGB") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, value if mode == "L" else (value, 0, 255)).save(path)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "pets"
    for index in range(20):
        draw(root / "cat" / f"{index:02}.png", 10)
        draw(root / "dog" / "young" / f"{index:02}.PNG", 200)
    return root


def test_a_folder_is_read(folder: Path) -> None:
    splits = open_image_folder(folder, image_size=8, validation_fraction=0.25)
    source = splits.train
    image, label = source[0]
    assert image.shape == (3, 8, 8) and image.dtype == torch.float32 and label == 0
    assert torch.allclose(image[:, 0, 0], torch.tensor([10 / 127.5 - 1, -1.0, 1.0]))
    assert source.classes == ("cat", "dog")
    assert source.locate(0) == str(source.files[0].path)
    names = {file.name for file in source.files}
    held_out = {file.name for file in splits.validation["validation"].files}
    assert len(names) + len(held_out) == 40 and not names & held_out and held_out
    assert splits.sizes["num_classes"] == 2 and splits.sizes["in_features"] == 192
    assert json.loads(json.dumps(splits.facts)) == splits.facts
    batch = next(Loader(source, BatchPlan(len(source), 4), weight=lambda b: len(b[0])).iterate())
    assert batch.data[0].shape == (4, 3, 8, 8) and batch.data[1].dtype == torch.int64


def test_an_image_stays_on_its_side(folder: Path) -> None:
    before = {f.name for f in open_image_folder(folder).validation["validation"].files}
    for index in range(20, 40):
        draw(folder / "cat" / f"{index:02}.png", 10)
    after = {f.name for f in open_image_folder(folder).validation["validation"].files}
    assert before <= after


def test_gray_and_odd_shapes(tmp_path: Path) -> None:
    draw(tmp_path / "a" / "wide.png", 255, (31, 7), "L")
    draw(tmp_path / "b" / "high.png", 0, (7, 100))
    source = open_image_folder(tmp_path, image_size=16, channels=1, validation_fraction=0.0).train
    assert source[0][0].shape == source[1][0].shape == (1, 16, 16)
    assert (source[0][0] == 1.0).all()


def test_the_middle_is_cut_out(tmp_path: Path) -> None:
    pixels = np.zeros((8, 24, 3), dtype=np.uint8)
    pixels[:, 8:16] = 255
    (tmp_path / "a").mkdir()
    Image.fromarray(pixels).save(tmp_path / "a" / "x.png")
    image, _ = open_image_folder(tmp_path, image_size=8, validation_fraction=0.0).train[0]
    assert (image == 1.0).all()


def test_a_validation_folder_of_its_own(folder: Path, tmp_path: Path) -> None:
    draw(tmp_path / "held" / "cat" / "x.png", 1)
    draw(tmp_path / "held" / "dog" / "y.png", 1)
    splits = open_image_folder(folder, validation_path=tmp_path / "held")
    assert len(splits.train) == 40 and len(splits.validation["validation"]) == 2
    draw(tmp_path / "held" / "eel" / "y.png", 1)
    with pytest.raises(DataError, match=r"other classes than .*: eel"):
        open_image_folder(folder, validation_path=tmp_path / "held")


def test_what_is_no_image_is_listed(folder: Path) -> None:
    (folder / "cat" / "notes.txt").write_text("x")
    (folder / "README").write_text("x")
    (folder / ".hidden").write_text("x")
    assert open_image_folder(folder).facts["skipped"] == [
        {"name": "README", "reason": "in no class folder"},
        {"name": "cat/notes.txt", "reason": "no image by its name"},
    ]


def test_missing_and_empty_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(MissingDataError, match=r"the folder .* does not exist"):
        open_image_folder(tmp_path / "nothing")
    with pytest.raises(MissingDataError, match="has no class folder"):
        open_image_folder(tmp_path)
    draw(tmp_path / "a" / "x.png", 1)
    (tmp_path / "b").mkdir()
    with pytest.raises(MissingDataError, match=r"the class folder .*b has no image"):
        open_image_folder(tmp_path)
    with pytest.raises(RequestError):
        open_image_folder(tmp_path, validation_fraction=1.0)


def test_a_torn_image_is_named(folder: Path) -> None:
    victim = folder / "cat" / "03.png"
    victim.write_bytes(victim.read_bytes()[:40])
    source = open_image_folder(folder, image_size=8, validation_fraction=0.0).train
    loader = Loader(source, BatchPlan(40, 8, order=IN_ORDER), weight=lambda b: 1.0)
    with pytest.raises(DataError, match=r"03\.png is not a readable image") as caught:
        next(loader.iterate())
    assert caught.value.where == f"sample 3 of {source.name} ({victim})"


def test_the_fingerprint_follows_content_names_and_size(folder: Path) -> None:
    first = open_image_folder(folder, image_size=8).train.fingerprint()
    assert open_image_folder(folder, image_size=8).train.fingerprint() == first
    assert open_image_folder(folder, image_size=9).train.fingerprint() != first
    victim = open_image_folder(folder).train.files[0].path
    draw(victim, 11)
    changed = open_image_folder(folder, image_size=8).train.fingerprint()
    assert changed != first
    victim.rename(victim.with_name("renamed.png"))
    assert open_image_folder(folder, image_size=8).train.fingerprint() not in (first, changed)


def test_without_pillow_the_remedy_is_told(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(MissingDataError) as caught:
        open_image_folder(folder)
    assert "pip install" in caught.value.remedy
