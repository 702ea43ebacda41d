"""Logs that are printed text: `NAME VALUE` pairs, or a Python or JSON mapping in a line.

Examples: `step 10: train loss 4.21, val loss 4.30`, `Epoch [1/5], Step [100/600], Loss: 0.52`,
`{'loss': 0.52, 'learning_rate': 5e-05, 'epoch': 0.1}`. A line that holds no loss is no row.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from surefoot.core.errors import RequestError
from surefoot.diagnosis.columns import canonical
from surefoot.diagnosis.recording import Recording, RecordingBuilder

NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?|nan|[-+]?inf"
PAIR = re.compile(
    rf"(?P<name>[A-Za-z][\w/.]*(?: [A-Za-z][\w/.]*){{0,2}})[ \t]*[:=]?[ \t]*[\[(]?"
    rf"(?P<value>{NUMBER})(?![\w.])",
)
PLACE = re.compile(r"^\(epoch: \d+, iters: \d+, time: [\d.]+, data: [\d.]+\) ")
"""How the losses of several networks begin that are trained in turns, by their own names."""
SUMMARY = "train_runtime"
"""A mapping with it sums the whole run up."""


def read_text(path: Path) -> Recording:
    """The lines of a printed log that hold a loss.

    Raises:
        RequestError: none does.
    """
    builder = RecordingBuilder(str(path), "text")
    with open(path, encoding="utf-8", errors="replace") as file:
        for line in file:
            row = _mapping_in(line) or dict(_pairs_in(line))
            if _holds_a_loss(row) and SUMMARY not in row:
                builder.add(row)
    recording = builder.build()
    if not recording.num_rows:
        raise RequestError(
            "no line of this log holds a loss",
            where=str(path),
            rule="a line prints names and numbers, such as `step 10: loss 4.21`",
            remedy="the page on the doctor lists the formats that are read",
        )
    return recording


def _mapping_in(line: str) -> dict[str, object]:
    """The mapping that a line holds; empty where it holds none."""
    begin, end = line.find("{"), line.rfind("}")
    if begin < 0 or end < begin or len(line) > 100_000:
        return {}
    try:
        value = ast.literal_eval(line[begin : end + 1])
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return {}
    return {str(k): v for k, v in value.items()} if isinstance(value, dict) else {}


def _pairs_in(line: str) -> Iterator[tuple[str, str]]:
    names_are_losses = False
    if place := PLACE.match(line):
        yield from _pairs_in(place[0].strip(" ()"))
        line, names_are_losses = line[place.end() :], True
    for found in PAIR.finditer(line):
        yield (f"loss_{found['name']}" if names_are_losses else found["name"]), found["value"]


def _holds_a_loss(row: Mapping[str, object]) -> bool:
    known = (canonical(name) for name in row)
    return any(name is not None and name.is_loss for name in known)
