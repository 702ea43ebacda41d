"""SF708: the random stream is set back while training."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch.utils.data import RandomSampler

from surefoot.core.finding import Certainty, Finding
from surefoot.sanitizer import events as ev
from surefoot.sanitizer.frames import Site
from surefoot.sanitizer.rules.base import Rule, RuleInfo
from surefoot.sanitizer.rules.streams import generator_digest
from surefoot.sanitizer.trace import Trace

LEAST = 2


class RngResetInLoop(Rule):
    """Global seed set after training began, or the state at an epoch's start seen before."""

    info = RuleInfo(
        code="SF708",
        slug="rng-reset-in-loop",
        certainty=Certainty.STRONG,
        title="A random stream is seeded again and again while training.",
        observes="The same seed set for the global stream after training began, several times, in"
        " force when training goes on; or a shuffling loader that starts an epoch from a random"
        " state that an earlier epoch started from. Quiet for seeds that change, states that are"
        " put back, and resuming.",
        why="Dropout masks, augmentation and the order of the data repeat.",
        example="for epoch in range(10):\n    torch.manual_seed(0)\n    train_epoch()",
        fix="Seed once before training; use a torch.Generator of its own for what must repeat.",
        source="Follows from what a seed does.",
    )

    def __init__(self, trace: Trace) -> None:
        super().__init__(trace)
        self.pending: tuple[Site, object] | None = None
        self.resets: dict[tuple[Site, str], list[int]] = defaultdict(list)
        self.starts: dict[tuple[int, str], int] = {}
        self.restored = 0
        self.repeats: dict[Site, int] = defaultdict(int)

    def on_state_restored(self, event: ev.StateRestored) -> None:
        self.restored += 1
        self.starts.clear()
        self.pending = None

    def on_seeded(self, event: ev.Seeded) -> None:
        if event.library == "torch" and self.trace.training_began:
            self.pending = event.site, event.seed

    def on_stream_put_back(self, event: ev.StreamPutBack) -> None:
        self.pending = None

    def on_forward_end(self, event: ev.ForwardEnd) -> None:
        if self.pending is None or not event.grad_enabled or not event.training:
            return
        (site, seed), self.pending = self.pending, None
        # Who restores the state afterwards (fork_rng) also restores the seed it came from.
        if isinstance(seed, int) and torch.initial_seed() == seed % 2**64:
            entry = self.resets[site, str(seed)]
            if len(entry) < 1000:
                entry.append(self.trace.updates)

    def on_loader_started(self, event: ev.LoaderStarted) -> None:
        if not isinstance(event.owner.sampler, RandomSampler):
            return
        digest = generator_digest(event.owner)
        before = self.starts.get((event.loader.key, digest))
        if before is not None and self.trace.updates > before and event.loader.steps:
            self.repeats[event.site] += 1
        if len(self.starts) < 10_000:
            self.starts[event.loader.key, digest] = self.trace.updates

    def findings(self) -> Iterable[Finding]:
        told = False
        for (site, seed), updates in self.resets.items():
            if len(set(updates)) >= LEAST:
                told = True
                yield self.report(
                    f"torch.manual_seed({seed}) ran {len(updates)} times after training began, and"
                    " training went on from it.",
                    site,
                    evidence={"seed": seed, "resets": len(updates), "at_updates": updates[:20]},
                )
        for site, count in self.repeats.items():
            if not told:
                yield self.report(
                    f"{count} epochs started from a random state that an earlier epoch had started"
                    " from: the order of the data repeats.",
                    site,
                    evidence={"repeats": count},
                )
