"""Logs that are rows of named numbers: JSONL, CSV and HF Trainer's state. Changes no number."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from surefoot.core.errors import DataError
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
        head = file.readline()
        mark = max(",;\t", key=head.count)
        file.seek(0)
        reader = csv.DictReader(file, delimiter=mark)
        if not reader.fieldnames:
            raise DataError("The log has no header.", where=str(path))
        for row in reader:
            take(builder, {name: value for name, value in row.items() if name and value})
    return builder.build()


def read_trainer_state(path: Path) -> Recording:
    """HF Trainer's `trainer_state.json`.

    Raises:
        DataError: it is no JSON, or has no `log_history`.
    """
    try:
        state = json.loads(path.read_text(encoding="utf-8"))
        history = state["log_history"]
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(
            "The file is no state of HF Trainer.",
            where=str(path),
            rule="it is a JSON object with the key `log_history`",
        ) from error
    builder = RecordingBuilder(str(path), "HF trainer_state.json")
    for row in history:
        # The last entry sums the whole run up: its `train_loss` is a mean over all of it.
        if "train_runtime" not in row:
            take(builder, {k: v for k, v in row.items() if k != "total_flos"})
    if isinstance(state.get("max_steps"), int):
        builder.facts["horizon_updates"] = state["max_steps"]
    return builder.build()
