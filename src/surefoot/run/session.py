"""The one way in which a run starts: choose where to begin, build once, open, restore, train.

    where    a run to go on with is read and compared, its folder taken, its checkpoint chosen
    build    data, model and every part of the run, once and final: here is refused what cannot run
    open     the folder of a new run is made; logs, signals and watch begin
    restore  the state goes back to the checkpoint
    record   configuration, contract and record are written
    train    to the end, or to a stop; the folder is given back, whatever happens

A new run that is refused has made no folder; a resume that is refused leaves the folder as it was.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from surefoot.assembly.checks import check_keepable, check_trainable
from surefoot.assembly.material import Prepared
from surefoot.assembly.process import Process, prepare_process
from surefoot.assembly.run_parts import Assembly, assemble
from surefoot.config.load import Resolved
from surefoot.core.interruption import no_exit
from surefoot.core.reports import Observer
from surefoot.engine.interrupt import StopOnSignal
from surefoot.observe.readers.run_data import read_contract
from surefoot.observe.record import RunRecord, write_record
from surefoot.observe.run_folder import RunFolder, naming_folder
from surefoot.observe.watch import flight_recorder_files, set_where_free
from surefoot.parallel.digests import digest_of_weights
from surefoot.parallel.layout import Place
from surefoot.parallel.lookout import attached
from surefoot.run.contract import check_contract, promise
from surefoot.run.data_sheet import write_data_sheet
from surefoot.run.folder_roles import Folder, take_folder
from surefoot.run.folder_run import FolderRun, RunResult, WatchBatches, unwatched
from surefoot.run.identity import begins_trained, identity_of, remember_trained
from surefoot.run.rank_agreement import refuse_different_runs
from surefoot.run.run_facts import RunDescription, describe, make_record
from surefoot.run.settings_observers import make_named_observers, make_observers
from surefoot.run.start import NEW, ResumedStart, ResumeRequest, Start, read_resumption, reopen


@dataclass(frozen=True)
class RunHooks:
    """Callbacks of a run. None of them changes a number."""

    observers: tuple[Observer, ...] = ()
    say: Callable[[str], None] = lambda text: None
    """Says a line to a person."""
    on_assembled: Callable[[Assembly], None] = lambda assembly: None
    """Sees the parts once they are built, before anything is written."""
    watch_batches: WatchBatches = unwatched
    """Sees the run between two micro-batches."""
    on_finished: Callable[[RunResult, Prepared], None] = lambda result, prepared: None
    """Is handed what has run to its horizon and lies whole on this rank; on one rank only."""
    on_end: Callable[[Path], None] = lambda folder: None
    """Is told the folder of the run once that is given back, however the run ended; on one rank
    only."""


@dataclass(frozen=True)
class RunRequest:
    """What is asked for: what to train, how, and where it is written down."""

    name: str
    resolved: Resolved[Any]
    prepare: Callable[[bool], Prepared]
    """Opens the data and makes the model, in a prepared process; told whether a checkpoint will
    replace its weights."""
    make_folder: Callable[[int], RunFolder]
    """Makes the folder of a new run, which will need so many bytes at most."""
    resume: ResumeRequest | None = None
    """None for a new run."""
    hooks: RunHooks = field(default_factory=RunHooks)


def start_run(asked: RunRequest) -> RunResult:
    """Runs to the end, or to a stop. Every run starts here.

    Raises:
        SurefootError: the run cannot start, or failed; its folder says how.
    """
    settings, hooks = asked.resolved.settings, asked.hooks
    resumption = None if asked.resume is None else read_resumption(asked.resume, asked.resolved)
    process = prepare_process(settings)
    asked = with_named_observers(asked, process)
    with no_exit(), ExitStack() as held:
        if resumption is None:
            start: Start = NEW
            built = build(asked, process)
            folder = make_folder(asked, built)
        else:
            start = resumed = reopen(resumption, process, settings, hooks.say)
            folder = resumed.folder
            held.enter_context(closing(folder))
            built = build(asked, process, resumed)
            resumed.check(built.described, built.assembly)
        held.callback(_tell_end, folder, hooks.on_end)
        result = train(asked, built.prepared, built.described, built.assembly, folder, start)
        if result.status == "finished" and built.assembly.place.has_whole_model:
            folder.on_owner(lambda own: hooks.on_finished(result, built.prepared))
    return result


def with_named_observers(asked: RunRequest, process: Process) -> RunRequest:
    """The request with the observers that the settings name; they are called on rank 0.

    Raises:
        RequestError: one cannot be made, or is no observer.
    """
    named = make_named_observers(asked.resolved.settings)
    if not named or process.place.ranks.rank > 0:
        return asked
    hooks = asked.hooks
    observers = (*hooks.observers, *named)
    return replace(asked, hooks=replace(hooks, observers=observers))


@dataclass(frozen=True)
class BuiltRun:
    """A run that could begin."""

    prepared: Prepared
    assembly: Assembly
    described: RunDescription


def build(
    asked: RunRequest,
    process: Process,
    resumed: ResumedStart | None = None,
) -> BuiltRun:
    """Opens the data, makes the model and every part of the run; writes nothing.

    Raises:
        SurefootError: the run cannot be trained, or not be kept, or differs between the ranks.
    """
    settings = asked.resolved.settings
    prepared = asked.prepare(resumed is not None)
    check_trainable(prepared.material, settings)
    # Before the model is laid out: shards and wrappers have other classes.
    identity = identity_of(prepared.material, resuming=resumed is not None)
    initial_weights = identity.get("initial_weights", "")
    if not initial_weights and process.place.ranks.size > 1:
        initial_weights = digest_of_weights(prepared.material.model)
    if resumed is None:
        assembly = assemble(prepared.material, settings, process)
    else:
        began = resumed.begun_for, resumed.begun_with
        assembly = assemble(prepared.material, settings, process, *began)
    refuse_different_runs(asked.resolved, prepared, assembly, initial_weights)
    check_keepable(assembly)
    asked.hooks.on_assembled(assembly)
    described = describe(asked.name, asked.resolved, prepared, assembly, identity)
    return BuiltRun(prepared, assembly, described)


def make_folder(asked: RunRequest, built: BuiltRun) -> Folder:
    """The folder of a new run, once nothing is left that could refuse it."""
    assembly = built.assembly
    check_contract(assembly.settings, assembly.evaluate_one_batch)
    needed = built.described.needed_bytes()
    return take_folder(assembly.place.ranks, lambda: asked.make_folder(needed))


def train(
    asked: RunRequest,
    prepared: Prepared,
    described: RunDescription,
    assembly: Assembly,
    folder: Folder,
    start: Start,
) -> RunResult:
    """Opens the logs, restores, records and trains; gives the folder back.

    Raises:
        SurefootError: the run cannot go on, or failed; the folder says how.
    """
    hooks = asked.hooks
    with StopOnSignal(assembly.agreement) as stop, ExitStack() as held:
        held.enter_context(closing(folder))
        with naming_folder(folder.path):
            observers = [*open_observers(described, folder, assembly.place), *hooks.observers]
            run = FolderRun(
                assembly,
                folder,
                described.about,
                stop,
                observers,
                hooks.watch_batches,
                start.from_ephemeral,
            )
            held.enter_context(closing(run))
            watched = held.enter_context(ExitStack())
            # In this order: while others may ask for stacks, somebody writes them down.
            watched.enter_context(run.watch)
            watched.enter_context(attached(run.lookout_hooks()))
            # A resume that is refused leaves the folder as it was.
            resumed = start.restore(run)
            record = partial(make_record, described, run.memory_table(), resumed)
            folder.on_owner(lambda own: write_down(own, asked.resolved, prepared, record))
            start.announce(run)
            if text := begins_trained(described.identity):
                run.journal.note(text)
            progress, model = run.state.progress, assembly.material.model
            held.callback(lambda: remember_trained(model, folder.path.name, progress.step))
        return run.train(watched)


def open_observers(described: RunDescription, folder: Folder, place: Place) -> list[Observer]:
    """The observers that the settings ask for, on the rank that owns the folder."""
    if described.about["device"] == "cuda" and place.ranks.size > 1:
        set_where_free(flight_recorder_files(folder.artifacts_path))
    # From here on all ranks hear a signal; nothing is written before.
    place.ranks.gather("the run begins", None)
    shown: list[Observer] = []
    folder.on_owner(lambda own: shown.extend(make_observers(described, own)))
    return shown


def write_down(
    folder: RunFolder,
    resolved: Resolved[Any],
    prepared: Prepared,
    record: Callable[[], RunRecord],
) -> None:
    """Writes down what the run is, before it trains."""
    folder.write_config(resolved.as_yaml())
    before = read_contract(folder.contract_path)
    folder.write_contract(promise(resolved.settings, prepared.material.task, before))
    write_record(folder, record())
    prepared.save_artifacts(folder.artifacts_path)
    write_data_sheet(prepared, folder.artifacts_path)


def _tell_end(folder: Folder, on_end: Callable[[Path], None]) -> None:
    """Tells where the run lies; an attempt that was refused has left the folder as it was."""
    if any(event.data.get("attempt") == folder.attempt for event in folder.past_events()):
        folder.on_owner(lambda own: on_end(own.path))
