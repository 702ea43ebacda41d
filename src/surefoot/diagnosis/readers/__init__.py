"""Readers of logs, chosen by what a file holds, not by its suffix. They interpret no number."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from surefoot.core.errors import DataError, RequestError
from surefoot.diagnosis.readers.content import Content, content_of
from surefoot.diagnosis.readers.flat import read_csv, read_json, read_jsonl
from surefoot.diagnosis.readers.run_folder import is_run_folder, read_run_folder
from surefoot.diagnosis.readers.tensorboard import is_event_file, read_tensorboard
from surefoot.diagnosis.readers.text import read_text
from surefoot.diagnosis.recording import Recording

TRAINER_STATE = "trainer_state.json"
LOG_NAMES = (
    "metrics.jsonl", "metrics.csv", "log.jsonl", "log.csv", "results.csv", "metrics.json",
    "log.txt", "history.json", "trainer_log.jsonl",
)  # fmt: skip
FORMATS = (
    "a run folder, TensorBoard's event files, HF Trainer's state, CSV, JSON lines, a JSON document"
    " of rows or of lists, or text that prints names and numbers"
)
READERS: dict[Content, Callable[[Path], Recording]] = {
    Content.JSON_DOCUMENT: read_json,
    Content.JSON_LINES: read_jsonl,
    Content.TABLE: read_csv,
    Content.TEXT: read_text,
}


def read_recording(path: str | Path) -> Recording:
    """What a run recorded, from whichever of the known formats stands at `path`; of several runs,
    one after the other in one file, the last.

    Raises:
        RequestError: nothing is there, or it is in no known format.
        DataError: it cannot be read, or holds no row.
    """
    path = Path(path)
    if not path.exists():
        raise RequestError(
            "there is no such run or log", where=str(path), rule=f"it reads {FORMATS}"
        )
    recording = (_read_folder(path) if path.is_dir() else _read_file(path)).last_run()
    if not recording.columns and not recording.evaluations and not recording.events:
        seen = ", ".join(recording.ignored[:20])
        raise DataError(
            "The log holds no column that is known.",
            where=str(path),
            rule="it holds at least a column such as `loss`, `lr` or `grad_norm`"
            + (f"; it holds {seen}" if seen else ""),
            remedy="the page on the doctor lists the names that are known",
        )
    return recording


def _read_file(path: Path) -> Recording:
    if is_event_file(path):
        return read_tensorboard([path])
    if path.name == "metrics.jsonl" and is_run_folder(path.parent):
        return read_run_folder(path.parent)
    content = content_of(path)
    if content is None:
        raise RequestError(
            "the format of this log is not known", where=str(path), rule=f"it reads {FORMATS}"
        )
    return READERS[content](path)


def _read_folder(path: Path) -> Recording:
    if is_run_folder(path):
        return read_run_folder(path)
    states = sorted(path.glob(f"checkpoint-*/{TRAINER_STATE}"), key=lambda p: p.stat().st_mtime)
    if (path / TRAINER_STATE).is_file():
        return read_json(path / TRAINER_STATE)
    if states:
        return read_json(states[-1])
    event_files = sorted(file for file in path.rglob("*") if is_event_file(file))
    if event_files:
        return read_tensorboard(event_files)
    for name in LOG_NAMES:
        if (path / name).is_file():
            return _read_file(path / name)
    raise RequestError(
        "this folder holds no log that is known", where=str(path), rule=f"it reads {FORMATS}"
    )
