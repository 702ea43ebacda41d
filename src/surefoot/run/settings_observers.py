"""The observers that the settings ask for: the console and the sinks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from surefoot.config.sections import Settings, SinkSection
from surefoot.core.doors import Door, find_part, label_of
from surefoot.core.reports import Observer
from surefoot.core.targets import call, check_call
from surefoot.observe.evaluations import EvaluationFiles
from surefoot.observe.formatting import format_path
from surefoot.observe.observers import as_observer
from surefoot.observe.run_folder import RunFolder
from surefoot.observe.sinks import tensorboard
from surefoot.observe.terminal.console import ConsoleView
from surefoot.observe.terminal.view import RunFacts
from surefoot.run.run_facts import RunDescription


def make_observers(described: RunDescription, folder: RunFolder) -> list[Observer]:
    """The console and the sinks that the settings ask for."""
    log = described.settings.log
    total, unit = described.end
    observers: list[Observer] = [EvaluationFiles(folder.artifacts_path)]
    if log.tensorboard:
        observers.append(tensorboard(folder.path))
    for section, where in _sinks(described.settings):
        sink, name = find_part(Door.SINKS, section, where), label_of(Door.SINKS, section)
        observers.append(as_observer(call(sink, (folder.path,), section.arguments, name, where)))
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


def make_named_observers(settings: Settings) -> list[Observer]:
    """The observers that the settings name; they are made before the run has a folder.

    Raises:
        RequestError: one cannot be imported, made with its arguments, or is no observer; or a sink
            could not be made later.
    """
    for section, where in _sinks(settings):
        sink, name = find_part(Door.SINKS, section, where), label_of(Door.SINKS, section)
        check_call(sink, (Path(),), section.arguments, name, where)
    observers = []
    for index, named in enumerate(settings.observers):
        where, name = f"observers.{index}", label_of(Door.OBSERVERS, named)
        found = find_part(Door.OBSERVERS, named, where)
        observers.append(as_observer(call(found, (), named.arguments, name, where)))
    return observers


def _sinks(settings: Settings) -> Iterator[tuple[SinkSection, str]]:
    for index, section in enumerate(settings.log.sinks):
        yield section, f"log.sinks.{index}"
