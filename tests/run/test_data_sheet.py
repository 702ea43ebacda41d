"""The look at the data: decoded samples, pictures, lengths; and it changes nothing."""

from __future__ import annotations

import base64
import io
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import nn

from surefoot.assembly.material import Prepared
from surefoot.assembly.run_parts import Material
from surefoot.data.sources.arrays import ArraySource
from surefoot.data.sources.datasets import as_source
from surefoot.run.data_sheet import NUM_PICTURES, as_png, histogram, write_data_sheet
from surefoot.tasks.classification import ClassificationTask

MODEL = nn.Linear(1, 1)


def sheet(folder: Path, source: Any) -> dict[str, Any]:
    prepared = Prepared(Material(MODEL, ClassificationTask(2), source))
    found = json.loads(write_data_sheet(prepared, folder).read_text())
    return found["sets"]["train"]  # type: ignore[no-any-return]


def test_pictures_keep_their_pixels_and_labels(tmp_path: Path) -> None:
    pictures = torch.arange(20.0 * 3 * 4 * 5).reshape(20, 3, 4, 5)
    found = sheet(tmp_path, ArraySource((pictures, torch.arange(20))))
    assert found["samples"] == 20
    assert len(found["decoded"]) == NUM_PICTURES
    assert found["decoded"][-1]["id"] == 19 and found["decoded"][-1]["label"] == "19"
    image = Image.open(io.BytesIO(base64.b64decode(found["decoded"][0]["png"])))
    assert image.size == (5, 4)
    expected = (pictures[0] / pictures[0].max() * 255).round().to(torch.uint8)
    assert list(image.tobytes()) == expected.permute(1, 2, 0).flatten().tolist()


def test_large_and_grey_pictures(tmp_path: Path) -> None:
    image = Image.open(io.BytesIO(as_png(torch.zeros(1, 1000, 500))))
    assert max(image.size) <= 96 and image.mode == "L"


def test_lengths_of_token_samples_leave_padding_out(tmp_path: Path) -> None:
    ids = torch.ones(4, 6, dtype=torch.int64)
    mask = torch.tensor([[1] * n + [0] * (6 - n) for n in (2, 2, 5, 6)])
    found = sheet(tmp_path, ArraySource({"input_ids": ids, "attention_mask": mask}))
    assert found["lengths"] == [
        {"from": 2, "to": 2, "count": 2},
        {"from": 5, "to": 5, "count": 1},
        {"from": 6, "to": 6, "count": 1},
    ]


def test_many_lengths_are_counted_in_bins_and_none_is_lost() -> None:
    sizes = [random.Random(0).randrange(3, 5000) for _ in range(1)] + list(range(3, 3000))
    bins = histogram(sizes)
    assert sum(b["count"] for b in bins) == len(sizes)
    assert bins[0]["from"] == 3 and bins[-1]["to"] == max(sizes)
    assert histogram([]) == []


class Augmented(torch.utils.data.Dataset[Any]):
    """Draws from every global generator."""

    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> Any:
        return torch.rand(3) + random.random(), index


def test_it_leaves_no_trace_in_the_random_state(tmp_path: Path) -> None:
    source = as_source(Augmented(), "training data")
    torch.manual_seed(1)
    random.seed(1)
    sheet(tmp_path, source)
    drawn = torch.rand(1), random.random()
    torch.manual_seed(1)
    random.seed(1)
    assert drawn == (torch.rand(1), random.random())


class Broken(Augmented):
    def __getitem__(self, index: int) -> Any:
        raise OSError("the disk is gone")


def test_samples_that_cannot_be_read_are_said(tmp_path: Path) -> None:
    found = sheet(tmp_path, as_source(Broken(), "training data"))
    assert found == {"problem": "OSError: the disk is gone"}


@pytest.mark.parametrize("value", [torch.zeros(2), {"a": torch.zeros(1)}, "words"])
def test_any_sample_is_described(tmp_path: Path, value: Any) -> None:
    class One(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return 1

        def __getitem__(self, index: int) -> Any:
            return value

    (only,) = sheet(tmp_path, as_source(One(), "training data"))["decoded"]
    assert only["text"]
