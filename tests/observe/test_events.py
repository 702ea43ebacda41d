"""The event log: at once on the disk, over resumes, torn lines included."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from surefoot.core.errors import DataError, SurefootError
from surefoot.core.reports import Event
from surefoot.observe import events
from surefoot.observe.events import EventKind, EventLog, failure_event, read_events


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "events.jsonl"


def test_an_event_is_in_the_file_when_on_event_returns(path: Path) -> None:
    log = EventLog(path)
    event = Event("skip", 7, "loss is NaN", {"loss": 1.5, "ids": [1, 2]}, 123.5)
    log.on_event(event)
    assert list(read_events(path)) == [event]
    log.close()
    log.close()


def test_any_data_becomes_strict_json(path: Path) -> None:
    log = EventLog(path)
    log.on_event(
        Event(EventKind.NOTE, 0, "größe", {"loss": math.nan, "where": Path("a"), "t": (1,)})
    )
    log.close()
    fields = json.loads(path.read_text("utf-8"))
    assert fields["kind"] == "note"
    assert fields["message"] == "größe"
    assert fields["data"] == {"loss": "NaN", "where": repr(Path("a")), "t": [1]}
    assert fields["time"] > 0


def test_a_failure_keeps_type_remedy_and_traceback(path: Path) -> None:
    try:
        try:
            {}["missing"]  # type: ignore[index]
        except KeyError as cause:
            raise DataError("bad sample 7", where="digits[7]", remedy="look at it") from cause
    except DataError as error:
        event = failure_event(error, 12)
    assert (event.kind, event.step, event.message) == ("failure", 12, "DataError: bad sample 7")
    assert event.data["where"] == "digits[7]"
    assert event.data["remedy"] == "look at it"
    text = str(event.data["traceback"])
    assert "KeyError" in text
    assert "test_a_failure_keeps" in text
    assert failure_event(KeyboardInterrupt(), 0).message == "KeyboardInterrupt"


def test_the_history_goes_on_over_a_torn_line(path: Path) -> None:
    log = EventLog(path)
    log.on_event(Event("start", 0, "begins", {}, 1.0))
    log.close()
    with open(path, "ab") as file:
        file.write(b'{"kind":"sa')
    log = EventLog(path)
    log.on_event(Event("resume", 5, "goes on", {}, 2.0))
    log.close()
    read = list(read_events(path))
    assert [event.kind for event in read] == ["start", "unreadable", "resume"]
    assert read[1].message == '{"kind":"sa'


def test_a_full_disk_is_an_error(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(descriptor: int, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    log = EventLog(path)
    monkeypatch.setattr(events, "write_all", refuse)
    with pytest.raises(SurefootError, match="No space left"):
        log.on_event(Event("save", 1, "", {}, 1.0))
    log.close()


def test_a_log_that_was_deleted_or_replaced_stands_again_and_says_so(path: Path) -> None:
    log = EventLog(path)
    log.on_event(Event(EventKind.START, 0, "started", {}))
    path.unlink()
    log.on_event(Event(EventKind.SAVE, 4, "saved", {}))
    path.rename(path.with_suffix(".bak"))
    path.write_text("an editor's own\n")
    log.on_event(Event(EventKind.SAVE, 8, "saved", {}))
    log.close()
    kinds = [(event.kind, event.step) for event in read_events(path)]
    assert kinds == [("start", 0), ("note", 4), ("save", 4), ("note", 8), ("save", 8)]
    assert path.with_name("events.changed-1.jsonl").read_text() == "an editor's own\n"
