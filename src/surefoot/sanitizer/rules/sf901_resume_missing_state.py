"""SF901: a run goes on without part of its state."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.utils.data import RandomSampler

from surefoot.core.finding import Certainty, Finding
from surefoot.sanitizer import events as ev
from surefoot.sanitizer.frames import NOWHERE, Site
from surefoot.sanitizer.rules.base import Rule, RuleInfo
from surefoot.sanitizer.rules.streams import generator_digest
from surefoot.sanitizer.trace import Trace

COUNTERS = ("epoch", "step", "iter", "update", "batch", "sample", "token")
LEAST_UPDATES = 2


class ResumeMissingState(Rule):
    """Weights loaded and training continues, but other state was never saved or loaded."""

    info = RuleInfo(
        code="SF901",
        slug="resume-missing-state",
        certainty=Certainty.STRONG,
        title="A run is resumed without the state of its optimizer, scheduler or data order.",
        observes="A checkpoint with a counter (epoch, step) whose weights are loaded, after which"
        " a fresh optimizer with state (Adam, momentum), a fresh scheduler or scaler trains that"
        " was not restored; or a shuffling loader that starts from a random state that it had"
        " before. Quiet for fine-tuning from weights without a counter and for plain SGD.",
        why="Moments and schedule restart from zero, and the same samples come again: the loss"
        " jumps, and the run is not the one that was interrupted.",
        example="ckpt = torch.load(path)\nmodel.load_state_dict(ckpt['model'])\n"
        "start = ckpt['epoch'] + 1",
        fix="Save and load the state_dict of optimizer, scheduler and scaler, and the state of the"
        " data generator.",
        source="https://pytorch.org/tutorials/recipes/recipes/saving_and_loading_a_general_"
        "checkpoint.html",
    )

    def __init__(self, trace: Trace) -> None:
        super().__init__(trace)
        self.loaded_at = 0
        self.counter = ""
        self.contents: set[str] = set()
        self.load_site: Site = NOWHERE
        self.weights_restored = False
        self.restored: set[int] = set()
        self.missing: dict[str, tuple[Site, str]] = {}
        self.fresh: dict[int, tuple[str, Site]] = {}
        self.starts: dict[str, int] = {}
        self.restarts: list[tuple[Site, str]] = []

    def on_loaded(self, event: ev.Loaded) -> None:
        counter = _counter(event.contents)
        if counter:
            self.loaded_at, self.counter, self.load_site = event.seq, counter, event.site
            self.contents = _parts(event.contents)
            self.weights_restored = False

    def on_state_restored(self, event: ev.StateRestored) -> None:
        if event.kind == "module":
            self.weights_restored = self.weights_restored or self.loaded_at > 0
        else:
            self.restored.add(id(event.owner))

    @property
    def resumes(self) -> bool:
        return self.loaded_at > 0 and self.weights_restored

    def on_step_end(self, event: ev.StepEnd) -> None:
        optimizer = event.optimizer
        if not self.resumes or optimizer.steps != 1:
            return
        owner = optimizer.ref()
        if owner is None or id(owner) in self.restored or not _has_state(owner):
            return
        self.fresh[optimizer.key] = optimizer.kind, self.load_site

    def on_scheduler_step(self, event: ev.SchedulerStep) -> None:
        state, owner = event.scheduler, event.scheduler.ref()
        if not self.resumes or state.steps != 1 or state.inner or owner is None:
            return
        at_start = getattr(owner, "last_epoch", 2) <= 1
        trains = state.optimizer is not None and state.optimizer.steps > 0
        if id(owner) not in self.restored and at_start and trains:
            self.missing["scheduler"] = self.load_site, state.kind

    def on_loader_started(self, event: ev.LoaderStarted) -> None:
        if not isinstance(event.owner.sampler, RandomSampler):
            return
        digest = generator_digest(event.owner)
        before = self.starts.get(digest)
        if before is not None and before < self.loaded_at and self.resumes:
            self.restarts.append((event.site, str(event.loader)))
        if len(self.starts) < 10_000:
            self.starts.setdefault(digest, event.seq)

    def findings(self) -> Iterable[Finding]:
        for optimizer in self.trace.optimizers:
            if optimizer.key in self.fresh and optimizer.steps >= LEAST_UPDATES:
                kind, site = self.fresh[optimizer.key]
                saved = (
                    "it is in the checkpoint"
                    if "optimizer" in self.contents
                    else ("it is not in the checkpoint")
                )
                yield self.report(
                    f"Weights and {self.counter!r} were restored, but the state of {kind} was not"
                    f" ({saved}): its moments restarted from zero for {optimizer.steps} updates.",
                    site,
                    evidence={
                        "counter": self.counter,
                        "optimizer": kind,
                        "saved": "optimizer" in self.contents,
                        "updates_since": optimizer.steps,
                    },
                )
        for part, (site, kind) in self.missing.items():
            yield self.report(
                f"Weights and {self.counter!r} were restored, but the {part} ({kind}) was not: its"
                " schedule started anew.",
                site,
                evidence={"counter": self.counter, part: kind},
            )
        if self.restarts:
            site, _ = self.restarts[0]
            yield self.report(
                f"After weights and {self.counter!r} were restored, {len(self.restarts)} epochs"
                " started from random states that epochs before the checkpoint had started from:"
                " the same order of samples comes again.",
                site,
                evidence={"counter": self.counter, "repeated_epochs": len(self.restarts)},
            )


def _counter(contents: Any) -> str:
    """The key of a counter above zero in a checkpoint; empty where there is none."""
    if not isinstance(contents, Mapping):
        return ""
    has_weights = any(isinstance(v, Mapping) and _is_weights(v) for v in contents.values())
    for key, value in contents.items():
        named = isinstance(key, str) and any(word in key.lower() for word in COUNTERS)
        if named and isinstance(value, int) and not isinstance(value, bool) and has_weights:
            return str(key)
    return ""


def _is_weights(value: Mapping[Any, Any]) -> bool:
    return bool(value) and all(isinstance(v, torch.Tensor) for v in list(value.values())[:8])


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
