"""Names the batch, the layer and the line where a model's forward failed. It hides no error.

Inputs of a wrong shape or number type are found by torch, deep in a layer; what torch says of them
names neither the batch nor the samples.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import FrameType, TracebackType
from typing import Literal

import torch
from torch import nn

from surefoot.core.errors import ModelError
from surefoot.data.batch import MicroBatch, describe

OF_WRONG_INPUT = (RuntimeError, IndexError)
"""What torch raises on inputs that do not fit; subclasses, such as out of memory, do not count."""
MOST_NAMED_SAMPLES = 8


SIGNS_OF_SHORTAGE = (
    "out of memory",
    "can't allocate memory",
    "cannot allocate memory",
    "not enough memory",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out, on any device."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    said = str(error).lower()
    return isinstance(error, RuntimeError) and any(sign in said for sign in SIGNS_OF_SHORTAGE)


class naming_batch:
    """A context in which what torch says of a wrong input becomes a ModelError.

    Raises:
        ModelError: with the shapes of the batch, its samples, and the layer that refused.
    """

    __slots__ = ("_micro_batch",)

    def __init__(self, micro_batch: MicroBatch) -> None:
        self._micro_batch = micro_batch

    def __enter__(self) -> None:
        return None

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> Literal[False]:
        if error is None or kind is None or is_out_of_memory(error):
            return False
        if not _is_of_wrong_input(kind, trace):
            return False
        ids = self._micro_batch.ids
        more = ", …" if len(ids) > MOST_NAMED_SAMPLES else ""
        samples = ", ".join(map(str, ids[:MOST_NAMED_SAMPLES]))
        raise ModelError(
            f"the model failed on a batch of {describe(self._micro_batch.data)}: "
            f"{str(error).strip().splitlines()[0] if str(error).strip() else kind.__name__}",
            where=f"{_place(trace)}; samples {samples}{more}",
            rule="a batch has the shapes and number types that each layer expects",
            remedy="compare the shapes with the layer; --debug shows the whole traceback",
        ) from error


def _is_of_wrong_input(kind: type[BaseException], trace: TracebackType | None) -> bool:
    if kind is not ValueError:
        return kind in OF_WRONG_INPUT
    # Torch's own layers raise it too; one that the user's code raises is the user's to word.
    *_, (frame, _) = _frames(trace)
    return _module_of(frame).startswith("torch")


def _module_of(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def _frames(trace: TracebackType | None) -> Iterator[tuple[FrameType, int]]:
    while trace is not None:
        yield trace.tb_frame, trace.tb_lineno
        trace = trace.tb_next


def _place(trace: TracebackType | None) -> str:
    """The innermost module whose forward was running, and the innermost line outside of torch."""
    module = line = ""
    for frame, number in _frames(trace):
        own = frame.f_locals.get("self")
        if isinstance(own, nn.Module) and frame.f_code.co_name == "forward":
            module = f"{type(own).__name__}({own.extra_repr()})"
        if not _module_of(frame).startswith(("torch", "surefoot.engine")):
            line = f"{frame.f_code.co_filename}:{number}"
    return f"{module} at {line}" if module else line
