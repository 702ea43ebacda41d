"""Everything that is told of a run bears its step, and reaches logs and onlookers alike."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from surefoot.core.reports import EvalReport, Event
from surefoot.observe.events import read_events
from surefoot.observe.run_folder import RunFolder
from surefoot.run.folder_roles import MeasuredRun, OwnedFolder
from surefoot.run.journal import Journal
from surefoot.state.run_state import Progress

MEASURED = MeasuredRun(torch.device("cpu"), "fp32", 1, None)


class Listener:
    def __init__(self) -> None:
        self.heard: list[Event] = []

    def on_event(self, event: Event) -> None:
        self.heard.append(event)


def test_events_bear_the_step_and_evaluations_are_remembered(tmp_path: Path) -> None:
    folder = OwnedFolder(RunFolder.create_at(tmp_path / "run"))
    progress, listener = Progress(), Listener()
    journal = Journal(folder, MEASURED, progress, [listener])  # type: ignore[list-item]
    journal.note("before")
    progress.step = 3
    journal.failure(ValueError("it broke"))
    report = EvalReport(3, "held", {"loss": 0.5}, 1.0, 1, "raw", 0.1, 1.0)
    journal.observers.on_eval(report)
    journal.close()
    written = list(read_events(folder.path / "events.jsonl"))
    assert [(e.kind, e.step) for e in written] == [("note", 0), ("failure", 3)]
    assert [e.message for e in listener.heard] == ["before", "ValueError: it broke"]
    assert "Traceback" in str(written[1].data["traceback"]) or "ValueError" in str(written[1].data)
    assert journal.latest.values == {"held/loss": 0.5}
    folder.close()


def test_an_onlooker_that_fails_is_left_out_and_the_log_says_so(tmp_path: Path) -> None:
    class Broken:
        def on_event(self, event: Event) -> None:
            raise RuntimeError("deaf")

    folder = OwnedFolder(RunFolder.create_at(tmp_path / "run"))
    journal = Journal(folder, MEASURED, Progress(), [Broken()])  # type: ignore[list-item]
    journal.note("one")
    journal.note("two")
    journal.close()
    kinds = [event.kind for event in read_events(folder.path / "events.jsonl")]
    assert kinds == ["note", "observer-failed", "note"]
    folder.close()


@pytest.mark.parametrize("patient", [True, False])
def test_closing_twice_is_harmless(tmp_path: Path, patient: bool) -> None:
    folder = OwnedFolder(RunFolder.create_at(tmp_path / "run"))
    journal = Journal(folder, MEASURED, Progress(), patient=patient)
    journal.close()
    journal.close()
    folder.close()
