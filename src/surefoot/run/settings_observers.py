"""Who looks on at a run because its settings say so: the console and the sinks."""

from __future__ import annotations

from surefoot.core.reports import Observer
from surefoot.observe.evaluations import EvaluationFiles
from surefoot.observe.formatting import format_path
from surefoot.observe.run_folder import RunFolder
from surefoot.observe.sinks import TensorBoardSink
from surefoot.observe.terminal.console import ConsoleView
from surefoot.observe.terminal.view import RunFacts
from surefoot.run.run_facts import RunDescription


def make_observers(described: RunDescription, folder: RunFolder) -> list[Observer]:
    """The console and the sinks that the settings ask for."""
    log = described.settings.log
    total, unit = described.end
    observers: list[Observer] = [EvaluationFiles(folder.artifacts_path)]
    if log.tensorboard:
        observers.append(TensorBoardSink(folder.path / "tensorboard"))
    if log.console != "off":
        facts = RunFacts(
            name=described.name,
            folder=format_path(folder.path),
            total=total,
            unit=unit,
            counts="tokens" if described.counts_tokens else "samples",
            device=described.facts["device"],
            precision=described.facts["precision"]["name"],
        )
        view = ConsoleView(facts, log.console)
        view.start()
        observers.append(view)
    return observers
