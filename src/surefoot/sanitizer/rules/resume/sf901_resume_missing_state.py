"""SF901: a run goes on without part of its state."""

from __future__ import annotations

import ast
import functools
import sys
from collections.abc import Container, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import RandomSampler

from surefoot.sanitizer import events as ev
from surefoot.sanitizer.matchers.fingerprints import generator_digest
from surefoot.sanitizer.rules.base import NOWHERE, Certainty, Finding, Findings, Rule, Site

COUNTERS = ("epoch", "step", "iter", "update", "batch", "sample", "token")
MESSAGES = ("print", "debug", "info", "warning", "log", "write", "format")
MOST_STREAMS = 1000
STREAMS = ("rng", "random")
LEAST_UPDATES = 2
LEAST_COUNT = 8


class ResumeMissingState(Rule, page=__file__):
    """Weights loaded and training continues, but other state was never saved or loaded."""

    def setup(self) -> None:
        self.loaded_at = 0
        self.counter = ""
        self.counts_on = False
        """Whether the script goes on from the counter of the checkpoint."""
        self.contents: set[str] = set()
        self.load_site: Site = NOWHERE
        self.weights_restored = False
        self.random_known = self.random_named = False
        """Whether the checkpoint has the state of torch's random stream, which was not set yet:
        known by its bytes, or by its name only."""
        self.saved_streams: set[bytes] = set()
        self.counted: set[str] = set()
        """Keys whose value was the number of updates when it was saved."""
        self.updates_since = 0
        self.restored: set[int] = set()
        self.filled: set[int] = set()
        self.missing: dict[str, tuple[Site, str, str]] = {}
        """By part of the state: where the checkpoint was loaded, its class, and what is lost."""
        self.fresh: dict[int, Site] = {}
        """By optimizer that began without its state: where the checkpoint was loaded."""
        self.starts: dict[str, int] = {}
        self.restarts: list[Site] = []

    def on_loaded(self, event: ev.Loaded) -> None:
        counter = _counter(event.contents, self.counted)
        if counter:
            self.loaded_at, self.counter, self.load_site = event.seq, counter, event.site
            self.counts_on = _reads(event.site.file, counter)
            self.contents = _parts(event.contents)
            self.weights_restored = False
            states = _byte_tensors(event.contents)
            size = torch.get_rng_state().numel()
            self.random_named = any(
                state.numel() == size and any(word in key.lower() for word in STREAMS)
                for key, state in states.items()
            )
            self.random_known = not self.saved_streams.isdisjoint(map(_bytes, states.values()))

    def on_saved(self, event: ev.Saved) -> None:
        counts = {optimizer.steps for optimizer in self.trace.optimizers}
        for key, value in event.contents.items() if isinstance(event.contents, Mapping) else ():
            is_number = isinstance(value, int) and not isinstance(value, bool)
            if isinstance(key, str) and is_number and value >= LEAST_COUNT and value in counts:
                self.counted.add(key)
        states = {_bytes(state) for state in _byte_tensors(event.contents).values()}
        if states and len(self.saved_streams) < MOST_STREAMS:
            # Of the global stream, not of a generator of the script's own.
            self.saved_streams |= {_bytes(torch.get_rng_state())} & states

    def on_stream_put_back(self, event: ev.StreamPutBack) -> None:
        self.random_known = self.random_named = False

    def on_state_restored(self, event: ev.StateRestored) -> None:
        if event.kind == "module":
            self.weights_restored = self.weights_restored or self.loaded_at > 0
        else:
            self.restored.add(id(event.owner))

    @property
    def resumes(self) -> bool:
        return self.loaded_at > 0 and self.weights_restored

    @property
    def certainty(self) -> Certainty:
        return Certainty.STRONG if self.counts_on else Certainty.HEURISTIC

    def on_step_begin(self, event: ev.StepBegin) -> None:
        optimizer = event.optimizer
        owner = optimizer.ref()
        if self.resumes and optimizer.steps == 0 and owner is not None and len(owner.state):
            self.filled.add(optimizer.key)

    def on_scaler_stepped(self, event: ev.ScalerStepped) -> None:
        state, owner = event.scaler, event.scaler.ref()
        if not self.resumes or state.steps != 1 or owner is None or not owner.is_enabled():
            return
        if id(owner) not in self.restored:
            self.missing["gradient scaler"] = self.load_site, "GradScaler", "its scale"

    def on_step_end(self, event: ev.StepEnd) -> None:
        optimizer = event.optimizer
        self.updates_since += self.resumes
        if not self.resumes or optimizer.steps != 1:
            return
        owner = optimizer.ref()
        known = owner is None or id(owner) in self.restored or optimizer.key in self.filled
        if owner is not None and not known and _has_state(owner):
            self.fresh[optimizer.key] = self.load_site

    def on_scheduler_step(self, event: ev.SchedulerStep) -> None:
        state, owner = event.scheduler, event.scheduler.ref()
        if not self.resumes or state.steps != 1 or state.inner or owner is None:
            return
        at_start = getattr(owner, "last_epoch", 2) <= 1
        trains = state.optimizer is not None and state.optimizer.steps > 0
        if id(owner) not in self.restored and at_start and trains:
            self.missing["scheduler"] = self.load_site, state.kind, "its schedule"

    def on_loader_started(self, event: ev.LoaderStarted) -> None:
        if not isinstance(event.owner.sampler, RandomSampler):
            return
        digest = generator_digest(event.owner)
        before = self.starts.get(digest)
        if before is not None and before < self.loaded_at and self.resumes:
            self.restarts.append(event.site)
        if len(self.starts) < 10_000:
            self.starts.setdefault(digest, event.seq)

    def findings(self) -> Findings:
        if (self.random_known or self.random_named) and self.updates_since >= LEAST_UPDATES:
            yield self._finding(
                "Weights and {} were restored, but the random state in the checkpoint was not set:"
                f" {self.updates_since} updates drew other samples and masks than the run would"
                " have.",
                self.load_site,
                certainty=self.certainty if self.random_known else Certainty.HEURISTIC,
                fix="Call torch.set_rng_state() with the saved state.",
                updates_since=self.updates_since,
            )
        saved = "optimizer" in self.contents
        for optimizer in self.trace.optimizers:
            if optimizer.key in self.fresh and optimizer.steps >= LEAST_UPDATES:
                yield self._finding(
                    f"Weights and {{}} were restored, but the state of {optimizer.kind} was not"
                    f" (it is {'' if saved else 'not '}in the checkpoint): its moments restarted"
                    f" from zero for {optimizer.steps} updates.",
                    self.fresh[optimizer.key],
                    optimizer=optimizer.kind,
                    saved=saved,
                    updates_since=optimizer.steps,
                )
        for part, (site, kind, what) in self.missing.items():
            yield self._finding(
                f"Weights and {{}} were restored, but the {part} ({kind}) was not: {what} started"
                " anew.",
                site,
                **{part: kind},
            )
        if self.restarts:
            yield self._finding(
                f"After weights and {{}} were restored, {len(self.restarts)} epochs started from"
                " random states that epochs before the checkpoint had started from: the same order"
                " of samples comes again.",
                self.restarts[0],
                repeated_epochs=len(self.restarts),
            )

    def _finding(self, message: str, site: Site, **facts: Any) -> Finding:
        """A finding that names the counter of the checkpoint where the message has braces."""
        known: dict[str, Any] = {"certainty": self.certainty, "counter": self.counter, **facts}
        return self.report(message.format(repr(self.counter)), site, **known)


def _counter(contents: Any, counted: Container[str]) -> str:
    """The key of a counter in a checkpoint that has weights too; empty where there is none."""
    if not isinstance(contents, Mapping):
        return ""
    has_weights = any(isinstance(v, Mapping) and _is_weights(v) for v in contents.values())
    for key, value in contents.items():
        named = isinstance(key, str) and any(word in key.lower() for word in COUNTERS)
        named = named or key in counted
        if named and isinstance(value, int) and not isinstance(value, bool) and has_weights:
            return str(key)
    return ""


@functools.cache
def _reads(file: str, key: str) -> bool:
    """Whether the file, or the script itself, looks up `key` for more than a message."""
    main = getattr(sys.modules.get("__main__"), "__file__", "") or ""
    for name in {file, main} - {""}:
        try:
            tree = ast.parse(Path(name).read_text(encoding="utf-8"))
        except (OSError, ValueError, SyntaxError):
            continue
        if _looks_up(tree, key):
            return True
    return False


def _looks_up(node: ast.AST, key: str) -> bool:
    """Whether `checkpoint[key]` or `checkpoint.get(key)` is read somewhere in `node`."""
    if isinstance(node, ast.JoinedStr) or _is_message(node):
        return False
    asked: ast.AST | None = None
    if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load):
        asked = node.slice
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
        asked = node.args[0] if node.func.attr in ("get", "pop") else None
    if isinstance(asked, ast.Constant) and asked.value == key:
        return True
    return any(_looks_up(child, key) for child in ast.iter_child_nodes(node))


def _is_message(node: ast.AST) -> bool:
    if not isinstance(node, ast.Call):
        return False
    called = node.func
    name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
    return name in MESSAGES


def _is_weights(value: Mapping[Any, Any]) -> bool:
    return bool(value) and all(isinstance(v, torch.Tensor) for v in list(value.values())[:8])


def _byte_tensors(contents: Any) -> dict[str, torch.Tensor]:
    """The values of a checkpoint that could be the state of a generator of the host."""
    if not isinstance(contents, Mapping):
        return {}
    tensors = {k: value for k, value in contents.items() if isinstance(value, torch.Tensor)}
    return {
        str(k): t for k, t in tensors.items() if t.dtype is torch.uint8 and t.device.type == "cpu"
    }


def _bytes(state: torch.Tensor) -> bytes:
    return state.numpy().tobytes()


def _parts(contents: Mapping[Any, Any]) -> set[str]:
    parts = set()
    for value in contents.values():
        if isinstance(value, Mapping):
            if "param_groups" in value and "state" in value:
                parts.add("optimizer")
            elif "last_epoch" in value:
                parts.add("scheduler")
    return parts


def _has_state(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer remembers more than its weights: moments or momentum."""
    return any(
        isinstance(value, torch.Tensor) and value.numel() > 1
        for state in list(optimizer.state.values())[:8]
        for value in state.values()
    )
