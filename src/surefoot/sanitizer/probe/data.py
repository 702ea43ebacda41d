"""Observes data loaders, and the random streams of their workers. Draws from none of them."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import random
import shutil
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, get_worker_info
from torch.utils.data._utils import fetch as fetchers
from torch.utils.data.dataloader import _BaseDataLoaderIter

from surefoot.sanitizer import events as ev
from surefoot.sanitizer.frames import user_site
from surefoot.sanitizer.probe.patches import Patches
from surefoot.sanitizer.state import LoaderState
from surefoot.sanitizer.trace import Trace

WORKER_FETCHES = 3
"""The first fetches of each worker process are looked at."""


def attach(patches: Patches) -> None:
    """Watches data for as long as the patches are in place."""
    trace = patches.trace
    folder = Path(tempfile.mkdtemp(prefix="surefoot-audit-"))
    reader = WorkerReader(trace, folder, os.getpid())
    patches.on_restore(reader.close)
    trace.before_end.append(reader.read)

    def iterate(original: Any, self: DataLoader[Any]) -> Any:
        trace.safely(_started, trace, self)
        iterator = original(self)
        trace.safely(_mark, trace, self, iterator)
        return iterator

    def fetch_next(original: Any, self: _BaseDataLoaderIter) -> Any:
        try:
            batch = original(self)
        except StopIteration:
            trace.safely(_ended, self)
            trace.safely(reader.read)
            raise
        trace.safely(_fetched, trace, self, batch)
        return batch

    patches.around(DataLoader, "__iter__", iterate)
    patches.around(_BaseDataLoaderIter, "__next__", fetch_next)
    for kind in (fetchers._MapDatasetFetcher, fetchers._IterableDatasetFetcher):
        _watch_workers(patches, kind, folder)


def _started(trace: Trace, loader: DataLoader[Any]) -> None:
    state = trace.loaders.find(loader)
    if state is None:
        state = LoaderState(loader, trace.loaders.next_key(), user_site(3))
        trace.loaders.add(loader, state)
        state.sampler = type(_sampler(loader)).__name__
        try:
            state.num_batches = len(loader)
        except TypeError:
            state.num_batches = None
    state.epochs += 1
    trace.emit(ev.LoaderStarted(**trace.here(), loader=state, owner=loader))


def _mark(trace: Trace, loader: DataLoader[Any], iterator: Any) -> None:
    state = trace.loaders.find(loader)
    if state is not None:
        vars(iterator)["_surefoot_loader"] = state


def _sampler(loader: DataLoader[Any]) -> Any:
    """What decides the order; with a batch sampler of the user's, torch's `sampler` is unused."""
    order: Any = getattr(loader, "sampler", None)
    if getattr(loader, "batch_size", None) is None:
        order = getattr(loader, "batch_sampler", None) or order
        for _ in range(4):
            inner = getattr(order, "batch_sampler", None) or getattr(order, "sampler", None)
            if inner is None:
                break
            order = inner
    return order


def _fetched(trace: Trace, iterator: Any, batch: Any) -> None:
    state = iterator.__dict__.get("_surefoot_loader")
    if state is None:
        return
    state.batches += 1
    trace.data.batches += 1
    trace.data.loader = state
    trace.emit(ev.BatchFetched(**trace.here(), loader=state, batch=batch))


def _ended(iterator: Any) -> None:
    state = iterator.__dict__.get("_surefoot_loader")
    if state is not None:
        state.ends += 1


class WorkerReader:
    """Collects what workers wrote down."""

    def __init__(self, trace: Trace, folder: Path, process: int) -> None:
        self.trace = trace
        self.folder = folder
        self.process = process
        self.positions: dict[Path, int] = {}

    def read(self) -> None:
        for file in sorted(self.folder.glob("*.jsonl")):
            lines = file.read_text().splitlines()
            for line in lines[self.positions.get(file, 0) :]:
                facts = json.loads(line)
                self.trace.emit(
                    ev.WorkerReport(**self.trace.here(), worker=facts["worker"], facts=facts)
                )
            self.positions[file] = len(lines)

    def close(self) -> None:
        # A forked worker inherits this object; only the process that made the folder ends it.
        if os.getpid() == self.process:
            shutil.rmtree(self.folder, ignore_errors=True)


def _watch_workers(patches: Patches, kind: type, folder: Path) -> None:
    original = kind.__dict__["fetch"]
    counts: dict[int, int] = {}

    def fetch(self: Any, indices: Any) -> Any:
        worker = get_worker_info()
        done = counts.get(os.getpid(), 0)
        if worker is None or done >= WORKER_FETCHES:
            return original(self, indices)
        counts[os.getpid()] = done + 1
        before = _streams_of(worker)
        try:
            return original(self, indices)
        finally:
            _write(folder, worker, done, before, _streams_of(worker))

    patches.set(kind, "fetch", fetch)


def _streams_of(worker: Any) -> dict[str, str]:
    try:
        return random_streams(worker.dataset)
    except Exception:
        # A data set may refuse to be looked at; in a worker there is nobody to be told.
        return {}


def _write(folder: Path, worker: Any, fetch: int, before: Any, after: Any) -> None:
    try:
        used = sorted(name for name in before if before[name] != after.get(name))
        facts = {
            "worker": worker.id,
            "pid": os.getpid(),
            "parent": os.getppid(),
            "fetch": fetch,
            "dataset": id(worker.dataset),
            "used": used,
            "before": before,
        }
        with (folder / f"{os.getpid()}.jsonl").open("a") as file:
            file.write(json.dumps(facts) + "\n")
    except OSError:
        pass


def random_streams(dataset: Any) -> dict[str, str]:
    """Digests of the states of the random streams that a worker could use."""
    states: dict[str, Callable[[], object]] = {
        "random (Python's global stream)": lambda: random.getstate(),
        "torch (global stream)": lambda: torch.get_rng_state().numpy().tobytes(),
    }
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        states["numpy.random (global stream)"] = lambda: numpy.random.get_state()
    states.update(_own_streams(dataset, numpy))
    digests = {}
    for name, state in states.items():
        try:
            digests[name] = hashlib.blake2b(pickle.dumps(state()), digest_size=8).hexdigest()
        except Exception:
            continue
    return digests


def _own_streams(dataset: Any, numpy: Any, depth: int = 3, prefix: str = "dataset") -> list[Any]:
    found: list[tuple[str, Callable[[], Any]]] = []
    for name, value in list(getattr(dataset, "__dict__", {}).items()):
        path = f"{prefix}.{name}"
        if isinstance(value, random.Random):
            found.append((path, value.getstate))
        elif isinstance(value, torch.Generator):
            found.append((path, partial(_torch_state, value)))
        elif numpy is not None and isinstance(value, numpy.random.Generator):
            found.append((path, partial(getattr, value.bit_generator, "state")))
        elif numpy is not None and isinstance(value, numpy.random.RandomState):
            found.append((path, value.get_state))
        elif depth and hasattr(value, "__dict__") and not isinstance(value, type):
            found += _own_streams(value, numpy, depth - 1, path)
    return found


def _torch_state(generator: torch.Generator) -> bytes:
    return generator.get_state().numpy().tobytes()
