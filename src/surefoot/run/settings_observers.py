"""Who looks on at a run because its settings say so: the console and the sinks."""

from __future__ import annotations

from typing import Any

from surefoot.assembly.run_parts import Assembly
from surefoot.core.reports import Observer
from surefoot.observe.evaluations import EvaluationFiles
from surefoot.observe.formatting import format_path
from surefoot.observe.run_folder import RunFolder
from surefoot.observe.sinks import TensorBoardSink
from surefoot.observe.terminal.console import ConsoleView
from surefoot.observe.terminal.view import RunFacts, Unit


def make_observers(name: str, assembly: Assembly, folder: RunFolder) -> list[Observer]:
    """The console and the sinks that the settings ask for."""
    log = assembly.settings.log
    total, unit = progress_of(assembly)
    facts = RunFacts(
        name=name,
        folder=format_path(folder.path),
        total=total,
        unit=unit,
        counts="tokens" if assembly.material.task.unit == "tokens" else "samples",
        device=str(assembly.trainable.device),
        precision=assembly.trainable.precision.name,
    )
    observers: list[Observer] = [EvaluationFiles(folder.artifacts_path)]
    if log.tensorboard:
        observers.append(TensorBoardSink(folder.path / "tensorboard"))
    if log.console != "off":
        view = ConsoleView(facts, log.console)
        view.start()
        observers.append(view)
    return observers


def progress_of(assembly: Assembly) -> tuple[float, Unit]:
    """Where the run ends, in updates where that is known before."""
    if isinstance(assembly.horizon_updates, int):
        return float(assembly.horizon_updates), "steps"
    horizon: Any = assembly.settings.train.horizon
    return float(horizon.value), horizon.kind
