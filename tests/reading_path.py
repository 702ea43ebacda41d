"""What must be read to know one plain update: the functions that it enters, and their files.

A small run is trained and one of its updates is traced, once all before it are settled: one rank,
CPU, fp32, AdamW, gradient clipping, a cosine schedule. Lines are those of the functions' source,
docstrings included. Run as a script, it prints what was counted and what was left out.

    python tests/reading_path.py
"""

from __future__ import annotations

import ast
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

import surefoot
from surefoot.engine.step import Update

SOURCE = Path(surefoot.__file__).parent
TRACED_UPDATE = 3
"""From 1: nothing is compiled, sampled or allocated for the first time in it."""
MAX_LINES, MAX_FILES = 250, 5
MAX_STACK = 10
"""Files between `Trainer.fit` and the optimizer's step."""

NOT_NUMERIC: Mapping[str, str] = {
    "tasks/": "the task is what a run brings, like its model: the update only calls it",
    "core/schedules.py": "so is the schedule: one formula of n, chosen by the recipe",
    "engine/refusal.py": "finds words for an error of the model; without one it does nothing",
    "engine/measure/": "looks at sampled windows; this is none",
}
"""What a traced update enters and is left out, though not what it calls: place -> why."""
RECORD = "engine/reporting.py:ReportLog._publish"
WHY_NO_RECORD = (
    "host side: the report of the update before, whose numbers are known and counted by then, is "
    "made, judged, told to observers and timed"
)
"""It is left out with all that it calls."""


@dataclass(frozen=True)
class Function:
    """A function of ours, with its lines."""

    file: str
    name: str
    first: int
    last: int
    does_nothing: bool

    @property
    def place(self) -> str:
        return f"{self.file}:{self.name}"

    @property
    def num_lines(self) -> int:
        return self.last - self.first + 1


@dataclass
class ReadingPath:
    """One update as it was traced.

    Args:
        counted: functions that handle its numbers.
        left_out: other functions that it entered, by the reason.
        stack: files between `Trainer.fit` and the optimizer's step, from the outside in.
    """

    counted: list[Function] = field(default_factory=list)
    left_out: dict[str, list[Function]] = field(default_factory=dict)
    stack: list[str] = field(default_factory=list)

    @property
    def files(self) -> list[str]:
        return sorted({function.file for function in self.counted})

    @property
    def num_lines(self) -> int:
        return sum(function.num_lines for function in self.counted)


@cache
def functions_of(file: str) -> list[Function]:
    """Every function of a file, inner ones after those around them."""

    def below(node: ast.AST, prefix: str) -> Iterator[Function]:
        for child in ast.iter_child_nodes(node):
            name = prefix
            if isinstance(child, ast.FunctionDef | ast.ClassDef):
                name = f"{prefix}.{child.name}".lstrip(".")
            if isinstance(child, ast.FunctionDef):
                assert child.end_lineno is not None
                empty = does_nothing(child)
                yield Function(file, name, child.lineno, child.end_lineno, empty)
            yield from below(child, name)

    return list(below(ast.parse((SOURCE / file).read_text(encoding="utf-8")), ""))


def does_nothing(node: ast.FunctionDef) -> bool:
    """Whether a function returns a constant, an argument or an empty context, and that is all."""
    body = node.body[1:] if ast.get_docstring(node) is not None else node.body
    if not body:
        return True
    if len(body) > 1 or not isinstance(body[0], ast.Return):
        return False
    returned = "None" if body[0].value is None else ast.unparse(body[0].value)
    given = {argument.arg for argument in node.args.args} - {"self"}
    return returned in {"None", "inf", "nullcontext()"} | given


def function_of(code: CodeType) -> Function | None:
    """The innermost function of ours that a code object lies in; None for foreign code."""
    path = Path(code.co_filename)
    if not path.is_relative_to(SOURCE):
        return None
    around = [
        function
        for function in functions_of(path.relative_to(SOURCE).as_posix())
        # A decorated function begins at its decorator.
        if function.first - 3 <= code.co_firstlineno <= function.last
    ]
    return min(around, key=lambda function: function.num_lines) if around else None


def reason_to_leave_out(function: Function) -> str | None:
    """Why a function is not counted; None where it is."""
    for place, reason in NOT_NUMERIC.items():
        if function.file.startswith(place):
            return reason
    if function.does_nothing:
        return "does nothing here: it returns None, a constant or what it was given"
    return None


class Tracer:
    """Follows the calls of one update; given to `sys.setprofile`."""

    def __init__(self) -> None:
        self.num_updates = 0
        self.found: dict[Function, str | None] = {}
        self._in_record: list[bool] = []
        """For each call under way, of ours and of others."""

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        is_update = frame.f_code is Update.__call__.__code__
        if is_update and event == "call":
            self.num_updates += 1
            self._in_record = [False]
        if self.num_updates != TRACED_UPDATE or not self._in_record:
            return
        if event == "call":
            self._in_record.append(self._enter(frame))
        elif event == "return":
            self._in_record.pop()
            if is_update:
                self._in_record = []

    def _enter(self, frame: FrameType) -> bool:
        function = function_of(frame.f_code)
        if function is None:
            return self._in_record[-1]
        in_record = self._in_record[-1] or function.place == RECORD
        reason = WHY_NO_RECORD if in_record else reason_to_leave_out(function)
        # What is called from the record and from elsewhere counts.
        self.found[function] = reason if self.found.get(function, reason) else None
        return in_record


def squared_error(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Sum over the samples."""
    inputs, targets = batch
    return (model(inputs) - targets).square().sum()


def trace_update() -> ReadingPath:
    """Trains a few updates and follows one of them."""
    settings = {
        "device": "cpu",
        "train": {"horizon": f"{TRACED_UPDATE + 2} steps", "micro_batch": 4, "clip_norm": 1.0},
        "optimizer": {"kind": "adamw", "lr": 1e-3},
        "schedule": {"kind": "warmup_cosine", "warmup": 1},
        "precision": {"dtype": "fp32"},
        "evaluate": {"every": "never"},
        "checkpoint": {"every": "end"},
        "log": {"console": "off"},
    }
    inputs = torch.randn(64, 8)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    tracer, path = Tracer(), ReadingPath()

    def keep_stack(*_: object) -> None:
        frame: FrameType | None = sys._getframe()
        files = []
        while frame is not None and frame.f_code is not surefoot.Trainer.fit.__code__:
            files.append(Path(frame.f_code.co_filename))
            frame = frame.f_back
        ours = [f.relative_to(SOURCE).as_posix() for f in files if f.is_relative_to(SOURCE)]
        path.stack = list(dict.fromkeys(["trainer.py", *reversed(ours)]))

    hook = register_optimizer_step_pre_hook(keep_stack)
    before = sys.getprofile()
    try:
        with tempfile.TemporaryDirectory() as runs:
            trainer = surefoot.Trainer(
                model, (inputs, inputs.sum(1, keepdim=True)), squared_error,
                settings=settings, runs=runs,
            )  # fmt: skip
            sys.setprofile(tracer)
            trainer.fit()
    finally:
        sys.setprofile(before)
        hook.remove()
    for function, reason in sorted(tracer.found.items(), key=lambda item: item[0].place):
        if reason is None:
            path.counted.append(function)
        else:
            path.left_out.setdefault(reason, []).append(function)
    return path


def main() -> None:
    """Prints what one plain update consists of."""
    path = trace_update()
    for file in path.files:
        functions = [function for function in path.counted if function.file == file]
        print(f"{sum(f.num_lines for f in functions):5} lines  {file}")
        for function in functions:
            print(f"{function.num_lines:8}   {function.name} (line {function.first})")
    print(f"{path.num_lines:5} lines in {len(path.files)} files: one plain update")
    print(f"      at most {MAX_LINES} lines, {MAX_FILES} files\n")
    print("Entered too, and not counted:")
    for reason, functions in path.left_out.items():
        print(f"{sum(f.num_lines for f in functions):5} lines  {reason}")
        for function in functions:
            print(f"{function.num_lines:8}   {function.place}")
    print(
        f"\nFrom Trainer.fit to the optimizer's step: {len(path.stack)} files, at most {MAX_STACK}"
    )
    print("  " + "\n  ".join(path.stack))


if __name__ == "__main__":
    main()
