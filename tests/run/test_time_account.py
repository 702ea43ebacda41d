"""Where the time of a process went stands in an event and in a file, once for each attempt."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from assembly.parts import assembled
from surefoot.observe.events import read_events
from surefoot.observe.run_folder import RunFolder
from surefoot.observe.time_ledger import TIME_LEDGER_NAME
from surefoot.run.folder_roles import GuestFolder, MeasuredRun, OwnedFolder
from surefoot.run.journal import Journal
from surefoot.run.time_account import TimeAccount

MEASURED = MeasuredRun(torch.device("cpu"), "fp32", 1, None)


def test_the_owner_writes_a_stretch_from_the_first_to_the_last_step(tmp_path: Path) -> None:
    assembly = assembled()
    folder = OwnedFolder(RunFolder.create_at(tmp_path / "run"))
    journal = Journal(folder, MEASURED, assembly.trainable.state.progress)
    update = assembly.make_update((journal.observers,))
    account = TimeAccount(assembly, update.parts.log)
    windows = assembly.open_windows(assembly.trainable.state.progress.cursor)
    update(next(windows))
    windows.close()
    update.parts.log.settle()
    for _ in range(2):
        account.write(folder, journal)
    account.write(GuestFolder(folder.path), journal)
    journal.close()
    held = json.loads((folder.artifacts_path / TIME_LEDGER_NAME).read_text())["stretches"]
    assert len(held) == 1 and (held[0]["first_step"], held[0]["last_step"]) == (0, 1)
    assert held[0]["attempt"] == folder.attempt
    phases = {name: s for name, s in held[0]["host_seconds"].items() if name != "wall"}
    assert abs(sum(phases.values()) - held[0]["host_seconds"]["wall"]) < 1e-3
    kinds = [event.kind for event in read_events(folder.path / "events.jsonl")]
    assert kinds == ["ledger"] * 3
    folder.close()
