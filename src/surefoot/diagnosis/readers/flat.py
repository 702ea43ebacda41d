"""Logs that are rows of named numbers: JSON lines, JSON documents and tables. Changes no number."""

from __future__ import annotations

import csv
import itertools
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from surefoot.core.errors import DataError
from surefoot.diagnosis.columns import canonical
from surefoot.diagnosis.readers.content import delimiter_of
from surefoot.diagnosis.readers.rows import take
from surefoot.diagnosis.recording import Recording, RecordingBuilder


def read_jsonl(path: Path) -> Recording:
    """One object a line: a row, an event (`kind` and `message`, or a name under `event`) or
    `{"facts": {...}}`.

    A torn last line is left out.

    Raises:
        DataError: a line inside it is no JSON object.
    """
    builder = RecordingBuilder(str(path), "JSONL")
    for row in _objects(path):
        if isinstance(row.get("facts"), Mapping):
            builder.facts.update({str(k): v for k, v in _mapping(row["facts"]).items()})
        else:
            take(builder, row)
    return builder.build()


def _objects(path: Path) -> Iterator[Mapping[str, object]]:
    lines = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            if not isinstance(row, dict):
                raise ValueError("no object")
        except ValueError as error:
            if number == len(lines):
                return  # A kill in the middle of a write leaves half a line.
            raise DataError(
                "A line of the log is no JSON object.", where=f"{path}:{number}"
            ) from error
        yield row


def _mapping(value: object) -> Mapping[object, object]:
    return value if isinstance(value, Mapping) else {}


def read_csv(path: Path) -> Recording:
    """A table with a header; an empty cell was not recorded.

    Raises:
        DataError: there is no header.
    """
    builder = RecordingBuilder(str(path), "CSV")
    with open(path, newline="", encoding="utf-8", errors="replace") as file:
        mark = delimiter_of(file.readline())
        file.seek(0)
        reader = csv.DictReader(file, delimiter=mark)
        if not reader.fieldnames:
            raise DataError("The log has no header.", where=str(path))
        names = _column_names(path, reader.fieldnames)
        for row in reader:
            cells = ((names.get(name), value) for name, value in row.items())
            take(builder, {name: value for name, value in cells if name and value})
    return builder.build()


EXPORTED = ("Wall time", "Step", "Value")
"""The header of one scalar that TensorBoard has exported; the name of the file holds its tag."""


def _column_names(path: Path, header: Iterable[str]) -> dict[str, str]:
    """What the columns of a table are called: those of exports lose what the tool has added."""
    names = [name for name in header if name]
    if tuple(names) == EXPORTED:
        tag = path.stem.rpartition("tag-")[2]
        return {"Step": "step", "Value": tag if canonical(tag) else "loss"}
    kept = (name for name in names if not name.endswith(("__MIN", "__MAX")))
    # An export of several runs' charts calls its columns `RUN - NAME`.
    return {name: name.strip().rpartition(" - ")[2] for name in kept}


def read_json(path: Path) -> Recording:
    """One document: HF Trainer's state, a list of rows, or lists of numbers by name.

    Raises:
        DataError: it is no JSON, or none of these.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise DataError("The log is no JSON document.", where=str(path)) from error
    rows = _rows_of(value)
    if rows is None:
        raise DataError(
            "The JSON document is no log.",
            where=str(path),
            rule="it is HF Trainer's state (`log_history`), a list of rows, or an object of lists"
            " of numbers",
        )
    is_state = isinstance(value, Mapping) and "log_history" in value
    builder = RecordingBuilder(str(path), "HF trainer_state.json" if is_state else "JSON")
    for row in rows:
        # The last entry sums the whole run up: its `train_loss` is a mean over all of it.
        if "train_runtime" not in row:
            take(builder, {k: v for k, v in row.items() if k != "total_flos"})
    if is_state and isinstance(value.get("max_steps"), int):
        builder.facts["horizon_updates"] = value["max_steps"]
    return builder.build()


ROWS = ("log_history", "history", "logs", "log", "rows", "metrics")
"""Keys under which a document holds its rows."""


def _rows_of(value: Any) -> list[Mapping[str, Any]] | None:
    """The rows of a document; None where it has none."""
    if isinstance(value, list):
        return value if value and all(isinstance(row, Mapping) for row in value) else None
    if not isinstance(value, Mapping):
        return None
    for name in ROWS:
        if name in value:
            return _rows_of(value[name])
    lists = {str(k): v for k, v in value.items() if isinstance(v, list) and k != "epoch"}
    if not lists:
        return None
    columns = itertools.zip_longest(*lists.values())
    return [
        {"epoch": epoch, **dict(zip(lists, cells, strict=True))}
        for epoch, cells in enumerate(columns)
    ]
