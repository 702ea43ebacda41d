"""One reader for each format of a log, and the choice among them. Readers interpret no number."""

from __future__ import annotations

from pathlib import Path

from surefoot.core.errors import DataError, RequestError
from surefoot.diagnosis.readers.flat import read_csv, read_jsonl, read_trainer_state
from surefoot.diagnosis.readers.run_folder import is_run_folder, read_run_folder
from surefoot.diagnosis.readers.tensorboard import is_event_file, read_tensorboard
from surefoot.diagnosis.recording import Recording

TRAINER_STATE = "trainer_state.json"
FORMATS = "a run folder, .jsonl, .csv, trainer_state.json, or TensorBoard's event files"


def read_recording(path: str | Path) -> Recording:
    """What a run recorded, from whichever of the known formats stands at `path`.

    Raises:
        RequestError: nothing is there, or it is in no known format.
        DataError: it cannot be read, or holds no row.
    """
    path = Path(path)
    if not path.exists():
        raise RequestError(
            "there is no such run or log", where=str(path), rule=f"it reads {FORMATS}"
        )
    recording = _read(path)
    if not recording.columns and not recording.evaluations and not recording.events:
        raise DataError(
            "The log holds no column that is known.",
            where=str(path),
            rule="it holds at least a column such as `loss`, `lr` or `grad_norm`",
            remedy="the page on the doctor lists the names that are known",
        )
    return recording


def _read(path: Path) -> Recording:
    if path.is_dir():
        return _read_folder(path)
    if is_event_file(path):
        return read_tensorboard([path])
    if path.name == "metrics.jsonl" and is_run_folder(path.parent):
        return read_run_folder(path.parent)
    if path.suffix in (".jsonl", ".ndjson"):
        return read_jsonl(path)
    if path.suffix in (".csv", ".tsv"):
        return read_csv(path)
    if path.suffix == ".json":
        return read_trainer_state(path)
    raise RequestError(
        "the format of this log is not known", where=str(path), rule=f"it reads {FORMATS}"
    )


def _read_folder(path: Path) -> Recording:
    if is_run_folder(path):
        return read_run_folder(path)
    states = sorted(path.glob(f"checkpoint-*/{TRAINER_STATE}"), key=lambda p: p.stat().st_mtime)
    if (path / TRAINER_STATE).is_file():
        return read_trainer_state(path / TRAINER_STATE)
    if states:
        return read_trainer_state(states[-1])
    event_files = sorted(file for file in path.rglob("*") if is_event_file(file))
    if event_files:
        return read_tensorboard(event_files)
    for name in ("metrics.jsonl", "metrics.csv", "log.jsonl", "log.csv"):
        if (path / name).is_file():
            return _read(path / name)
    raise RequestError(
        "this folder holds no log that is known", where=str(path), rule=f"it reads {FORMATS}"
    )
