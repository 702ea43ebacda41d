"""Reads scalars of TensorBoard's event files. Needs the extra `tensorboard`; changes nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from surefoot.core.errors import RequestError
from surefoot.diagnosis.recording import Recording, RecordingBuilder

MARK = ".tfevents."


def is_event_file(path: Path) -> bool:
    """Whether TensorBoard wrote it, by its name."""
    return MARK in path.name and path.is_file()


def read_tensorboard(paths: Sequence[Path]) -> Recording:
    """All scalars of these files, one row for each step.

    Raises:
        RequestError: tensorboard is not installed.
    """
    source = str(paths[0] if len(paths) == 1 else paths[0].parent)
    builder = RecordingBuilder(source, "TensorBoard")
    row: dict[str, object] = {}
    step = None
    for number, tag, value in sorted(_scalars(paths), key=lambda scalar: scalar[0]):
        if number != step or tag in row:
            if row:
                builder.add(row)
            step, row = number, {"step": number}
        row[tag] = value
    if row:
        builder.add(row)
    return builder.build()


def _scalars(paths: Sequence[Path]) -> Iterator[tuple[int, str, float]]:
    try:
        from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
        from tensorboard.util import tensor_util
    except ImportError as error:
        raise RequestError(
            "TensorBoard is not installed.",
            where=str(paths[0]),
            remedy='pip install "surefoot[tensorboard]"',
        ) from error
    for path in paths:
        for event in EventFileLoader(str(path)).Load():
            for value in event.summary.value:
                number = _number(value, tensor_util)
                if number is not None:
                    yield int(event.step), str(value.tag), number


def _number(value: Any, tensor_util: Any) -> float | None:
    """The loader turns every scalar into a tensor of one element; other summaries are left out."""
    if value.HasField("simple_value"):
        return float(value.simple_value)
    if value.HasField("tensor"):
        array = tensor_util.make_ndarray(value.tensor)
        if array.size == 1 and array.dtype.kind in "fiu":
            return float(array.reshape(()))
    return None
