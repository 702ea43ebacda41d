"""A look at the data as the model gets it: decoded samples of each set, and how long they are.

Reads a few samples at the start of a run, in a random state that is put back, and writes one
artifact. It never judges the data.
"""

from __future__ import annotations

import base64
import json
import struct
import zlib
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from surefoot.assembly.material import Prepared
from surefoot.data.sources.stream import by_index
from surefoot.numerics.determinism import preserved_rng
from surefoot.observe.files.atomic import atomic_write

DATA_SHEET_NAME = "data-sheet.json"
NUM_TEXTS = 3
NUM_PICTURES = 12
NUM_LENGTHS = 512
"""Samples whose length is taken, where no table of lengths is at hand."""
MOST_CHARACTERS = 600
MOST_PIXELS = 96
"""A larger picture is drawn smaller, by leaving rows and columns out."""
SHEET_BINS = 16


def write_data_sheet(prepared: Prepared, folder: Path) -> Path:
    """Writes `data-sheet.json` into the artifacts of a run; returns where it stands."""
    sets = {"train": prepared.material.train, **prepared.material.validation}
    found = {}
    with preserved_rng():
        for name, source in sets.items():
            if by_index(source) is None:
                continue
            try:
                found[name] = sheet_of(source, prepared)
            except Exception as error:
                # The training will say more of a sample that cannot be read, if it meets it.
                found[name] = {"problem": f"{type(error).__name__}: {error}"}
    path = folder / DATA_SHEET_NAME
    atomic_write(path, json.dumps({"format": 1, "sets": found}, ensure_ascii=False) + "\n")
    return path


def sheet_of(source: Any, prepared: Prepared) -> dict[str, Any]:
    """What is shown of one map-style set: counts, decoded samples, a histogram of lengths."""
    count = len(source)
    first = source[0]
    wanted = NUM_PICTURES if _picture(first) is not None else NUM_TEXTS
    places = sorted({round(i * (count - 1) / max(1, wanted - 1)) for i in range(wanted)})
    sheet: dict[str, Any] = {
        "samples": count,
        "decoded": [{"id": i, **decoded(source[i], prepared)} for i in places],
    }
    shard = getattr(source, "shard", None)
    if shard is not None:
        sizes = (shard.borders[1:] - shard.borders[:-1]).tolist()
        return sheet | {"lengths": histogram(sizes), "length_unit": "tokens of a document"}
    if isinstance(first, Mapping) and isinstance(first.get("input_ids"), Tensor):
        some = {round(i * (count - 1) / NUM_LENGTHS) for i in range(NUM_LENGTHS + 1)}
        sizes = [_length(source[i]) for i in sorted(some)]
        return sheet | {"lengths": histogram(sizes), "length_unit": "tokens of a sample"}
    return sheet


def decoded(sample: Any, prepared: Prepared) -> dict[str, str]:
    """One sample for eyes: `text`, or `png` (base64) and `label`."""
    picture = _picture(sample)
    if picture is not None:
        label = sample[1] if isinstance(sample, tuple | list) and len(sample) > 1 else ""
        value = label.item() if isinstance(label, Tensor) and label.numel() == 1 else label
        return {"png": base64.b64encode(as_png(picture)).decode(), "label": _short(value)}
    if isinstance(sample, Mapping) and prepared.text is not None and "input_ids" in sample:
        text = prepared.text.tokenizer.decode(sample["input_ids"].tolist())
        return {"text": str(text)[:MOST_CHARACTERS]}
    return {"text": _described(sample)}


def _short(value: object) -> str:
    return str(value)[:40]


def _described(sample: Any) -> str:
    if isinstance(sample, Tensor):
        values = ", ".join(f"{v:.4g}" for v in sample.flatten()[:12].tolist())
        more = ", ..." if sample.numel() > 12 else ""
        return f"{str(sample.dtype).removeprefix('torch.')} {list(sample.shape)}: {values}{more}"
    if isinstance(sample, Mapping):
        return "\n".join(f"{key}: {_described(value)}" for key, value in sample.items())
    if isinstance(sample, tuple | list):
        return "\n".join(_described(value) for value in sample)
    return repr(sample)[:MOST_CHARACTERS]


def _length(sample: Mapping[str, Any]) -> int:
    """Tokens of a sample that are no padding."""
    mask = sample.get("attention_mask")
    if isinstance(mask, Tensor):
        return int(mask.sum())
    return int(sample["input_ids"].shape[-1])


def _picture(sample: Any) -> Tensor | None:
    """The picture in a sample, [channels, height, width] with 1 or 3 channels; None for others."""
    value = sample[0] if isinstance(sample, tuple | list) and sample else sample
    if isinstance(value, Tensor) and value.ndim == 3 and value.shape[0] in (1, 3):
        return value
    return None


def as_png(picture: Tensor) -> bytes:
    """A picture [channels, height, width] as PNG, its values stretched from the lowest to the
    highest.
    """
    stride = max(1, -(-max(picture.shape[1:]) // MOST_PIXELS))
    values = picture[:, ::stride, ::stride].detach().to("cpu", torch.float32)
    low, high = float(values.min()), float(values.max())
    scaled = (values - low) / ((high - low) or 1.0) * 255
    pixels = scaled.round().clamp(0, 255).to(torch.uint8).permute(1, 2, 0).contiguous().numpy()
    height, width, channels = pixels.shape
    rows = b"".join(b"\x00" + pixels[row].tobytes() for row in range(height))
    colour = 0 if channels == 1 else 2
    header = struct.pack(">IIBBBBB", width, height, 8, colour, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + _chunk(b"IHDR", header)
        + _chunk(b"IDAT", zlib.compress(rows))
        + _chunk(b"IEND", b"")
    )


def _chunk(kind: bytes, data: bytes) -> bytes:
    checked = kind + data
    return struct.pack(">I", len(data)) + checked + struct.pack(">I", zlib.crc32(checked))


def histogram(sizes: Sequence[int]) -> list[dict[str, int]]:
    """Counts in bins of doubling width, or one bin a value where there are few.

    >>> histogram([1, 1, 2])
    [{'from': 1, 'to': 1, 'count': 2}, {'from': 2, 'to': 2, 'count': 1}]
    """
    if not sizes:
        return []
    values = sorted(set(sizes))
    if len(values) <= SHEET_BINS:
        return [{"from": v, "to": v, "count": sizes.count(v)} for v in values]
    edges = [values[0]]
    while edges[-1] <= values[-1]:
        edges.append(max(edges[-1] + 1, 2 * edges[-1]))
    found = []
    for low, above in pairwise(edges):
        count = sum(low <= size < above for size in sizes)
        if count:
            found.append({"from": low, "to": min(above - 1, values[-1]), "count": count})
    return found
