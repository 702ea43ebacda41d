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
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, cast

import xxhash

from surefoot.assembly.run_parts import Assembly
from surefoot.build import build_run
from surefoot.config.load import load_recipe
from surefoot.core.interruption import ShouldAbort
from surefoot.data.batch import MicroBatch
from surefoot.engine.evaluate import OpenSet
from surefoot.observe.run_folder import RunFolder
from surefoot.run.resume_rules import Resumption
from surefoot.run.session import config_of, train_in_folder
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


class _TracedLoader:
    """Hands on the micro-batches of a loader, and looks when a window is done.

    Args:
        look: looks at the state after a window with these samples; says whether it was the last.
    """

    def __init__(self, loader: Any, look: Callable[[tuple[int, ...]], bool]) -> None:
        self._loader = loader
        self._look = look

    def iterate(self, cursor: Any) -> Generator[MicroBatch, None, None]:
        if self._look(()):
            return
        ids: list[int] = []
        with closing(self._loader.iterate(cursor)) as micro_batches:
            for micro_batch in micro_batches:
                ids.extend(micro_batch.ids)
                yield micro_batch
                # Here the loop has asked for more: it is done with what it was given.
                if micro_batch.ends_window:
                    if self._look(tuple(ids)):
                        return
                    ids.clear()

    def leave_when(self, should_abort: ShouldAbort) -> None:
        self._loader.leave_when(should_abort)

    def close(self) -> None:
        self._loader.close()


def traced(assembly: Assembly, asked: TracedRun) -> Assembly:
    """The same run, looked at between every two updates and with short evaluations."""
    descriptor = os.open(asked.trace, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    kills = [] if asked.kill_after_window is None else [asked.kill_after_window]

    def look(ids: tuple[int, ...]) -> bool:
        trainable = assembly.trainable
        trainable.log.settle()
        progress = trainable.state.progress
        is_last = progress.window >= asked.last_window
        if is_last and not ids:
            # Killed after it was done: what it has left behind is compared, not this.
            return True
        point = TracePoint(
            progress.window,
            progress.step,
            ids,
            piece_hashes(trainable.state.capture()),
            time.monotonic(),
        )
        # One write: whoever reads sees the whole line, or none of it.
        os.write(descriptor, (json.dumps(asdict(point)) + "\n").encode())
        if kills and progress.window >= kills[-1]:
            kills.clear()
            _kill_after(asked.kill_delay_seconds)
        return is_last

    sets = {
        name: _shortened(open_set, asked.evaluation_batches)
        for name, open_set in assembly.evaluator.sets.items()
    }
    return replace(
        assembly,
        loader=cast(Any, _TracedLoader(assembly.loader, look)),
        evaluator=replace(assembly.evaluator, sets=sets),
    )


def _shortened(open_set: OpenSet, most: int) -> OpenSet:
    def opened() -> Iterator[MicroBatch]:
        with closing(cast(Any, open_set())) as micro_batches:
            yield from islice(micro_batches, most)

    return opened


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
    prepared, assembly = build_run(resolved.recipe, resuming=asked.resume)
    resumption = None
    if asked.resume:
        folder = RunFolder.open(asked.folder)
        before = load_recipe(config_of(asked.folder))
        resumption = Resumption(before.recipe.settings)
    else:
        folder = RunFolder.create_at(asked.folder)
    train_in_folder(folder, RUN_NAME, resolved, prepared, traced(assembly, asked), resumption)


def _print_into(path: Path) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
