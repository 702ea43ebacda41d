"""One training whose whole state is hashed between every two updates, in a process of its own.

The trace is taken where the loop asks for the next window: the update before is settled, evaluated
and saved, and nothing of the next has begun. It looks on; it changes no number of the run.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import xxhash

from surefoot.assembly.material import Prepared, prepare_material
from surefoot.assembly.run_parts import MicroBatches
from surefoot.config.load import load_recipe
from surefoot.data.sources.base import Source
from surefoot.data.sources.datasets import SubsetSource
from surefoot.observe.run_folder import RunFolder, config_of
from surefoot.run.folder_run import WatchBatches
from surefoot.run.session import RunHooks, RunRequest, start_run
from surefoot.run.start import ResumeRequest
from surefoot.state.run_state import RunState
from surefoot.verify.processes import write_error
from surefoot.verify.state_hash import piece_hashes

RUN_NAME = "proof"


@dataclass(frozen=True)
class TracedRun:
    """What one such training is asked to do; all of it can be sent to another process."""

    recipe: str
    """Path of the recipe's file."""
    folder: str
    """The run folder: made, or gone on with where it holds a checkpoint."""
    trace: str
    """File to which one line is added for each point between two updates."""
    output: str
    """File for everything that the training prints."""
    error: str
    """File in which the error stands where the training fails."""
    last_window: int
    """The data ends after this window."""
    evaluation_batches: int
    """Micro-batches of each validation set that an evaluation reads."""
    resume: bool = False
    kill_after_window: int | None = None
    """It sends itself SIGKILL after this window;"""
    kill_delay_seconds: float = 0.0
    """so long after it, whatever it is doing then."""


@dataclass(frozen=True)
class TracePoint:
    """The state of a run between two updates."""

    window: int
    """Windows consumed so far."""
    step: int
    ids: tuple[int, ...]
    """Samples of the window before; empty for the point at which a run begins or goes on."""
    pieces: dict[str, str]
    """Hash of each tensor and of each part of the state that is no tensor."""
    seconds: float
    """On the clock of its own process."""

    @property
    def hash(self) -> str:
        """One hash of the whole state."""
        lines = "".join(f"{name} {piece}\n" for name, piece in sorted(self.pieces.items()))
        return xxhash.xxh3_128_hexdigest(lines.encode())


def read_trace(path: Path) -> list[TracePoint]:
    """The points of a trace, in the order of time; a line cut off by a kill is left out."""
    if not path.exists():
        return []
    whole, _, _ = path.read_text(encoding="utf-8").rpartition("\n")
    points = (json.loads(line) for line in whole.splitlines())
    return [TracePoint(**{**point, "ids": tuple(point["ids"])}) for point in points]


def traced(asked: TracedRun) -> WatchBatches:
    """Looks at the whole state between every two updates, and ends the data after the last."""
    descriptor = os.open(asked.trace, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    kills = [] if asked.kill_after_window is None else [asked.kill_after_window]

    def look(state: RunState, ids: tuple[int, ...]) -> bool:
        """Looks at the state after a window with these samples; whether it was the last."""
        progress = state.progress
        is_last = progress.window >= asked.last_window
        if is_last and not ids:
            # Killed after it was done: what it has left behind is compared, not this.
            return True
        pieces = piece_hashes(state.capture())
        point = TracePoint(progress.window, progress.step, ids, pieces, time.monotonic())
        # One write: whoever reads sees the whole line, or none of it.
        os.write(descriptor, (json.dumps(asdict(point)) + "\n").encode())
        if kills and progress.window >= kills[-1]:
            kills.clear()
            _kill_after(asked.kill_delay_seconds)
        return is_last

    def watch(batches: MicroBatches, settled_state: Callable[[], RunState]) -> MicroBatches:
        if look(settled_state(), ()):
            return
        ids: list[int] = []
        with closing(batches):
            for micro_batch in batches:
                ids.extend(micro_batch.ids)
                yield micro_batch
                # Here the loop has asked for more: it is done with what it was given.
                if micro_batch.ends_window:
                    if look(settled_state(), tuple(ids)):
                        return
                    ids.clear()

    return watch


def _kill_after(seconds: float) -> None:
    timer = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGKILL))
    timer.daemon = True
    timer.start()


def run_traced(asked: TracedRun) -> None:
    """Trains as asked; the body of a process. What goes wrong stands in the error's file."""
    _print_into(Path(asked.output))
    # A console script starts without the folder it was called in: own code is found from there.
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        _train(asked)
    except BaseException as error:
        write_error(Path(asked.error), error)
        raise SystemExit(1) from None


def _train(asked: TracedRun) -> None:
    resolved = load_recipe(asked.recipe)
    recipe = resolved.recipe
    folder = Path(asked.folder)

    def prepare(resuming: bool) -> Prepared:
        prepared = prepare_material(recipe, resuming=resuming)
        size = recipe.evaluate.micro_batch
        batch = recipe.train.micro_batch if size == "as-in-training" else int(size)
        return shortened(prepared, asked.evaluation_batches * batch)

    start_run(
        RunRequest(
            RUN_NAME,
            resolved,
            prepare,
            make_folder=lambda needed_bytes: RunFolder.create_at(folder),
            resume=ResumeRequest(folder, lambda run: load_recipe(config_of(run)))
            if asked.resume
            else None,
            hooks=RunHooks(watch_batches=traced(asked)),
        )
    )


def shortened(prepared: Prepared, most: int) -> Prepared:
    """The same run, with the first samples of each validation set at most."""
    material = prepared.material
    validation = {name: first_samples(of, most) for name, of in material.validation.items()}
    return replace(prepared, material=replace(material, validation=validation))


def first_samples(source: Source, most: int) -> Source:
    """The first samples of a source, at most so many."""
    if len(source) <= most:
        return source
    return SubsetSource(source, np.arange(most, dtype=np.int64), source.name)


def _print_into(path: Path) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
