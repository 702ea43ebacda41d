"""Console and sinks look on only where the settings ask for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from assembly.parts import assembled
from surefoot.assembly.material import Prepared
from surefoot.config.load import resolve_settings
from surefoot.observe.run_folder import RunFolder
from surefoot.run.run_facts import describe
from surefoot.run.settings_observers import make_observers


def names(tmp_path: Path, log: dict[str, Any]) -> list[str]:
    assembly = assembled(log=log)
    described = describe(
        "tiny", resolve_settings(assembly.settings), Prepared(assembly.material), assembly
    )
    with RunFolder.create_at(tmp_path / "run") as folder:
        observers = make_observers(described, folder)
        for observer in observers:
            observer.close()
    return [type(observer).__name__ for observer in observers]


def test_evaluations_are_always_kept_and_the_rest_is_asked_for(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    quiet = names(tmp_path / "a", {"console": "off"})
    assert quiet == ["EvaluationFiles"]
    shown = names(tmp_path / "b", {"console": "plain"})
    assert shown == ["EvaluationFiles", "ConsoleView"]
