"""SF708: the random stream is set back while training."""

from __future__ import annotations

from collections import defaultdict

import torch
from torch.utils.data import RandomSampler

from surefoot.sanitizer import events as ev
from surefoot.sanitizer.matchers.fingerprints import generator_digest
from surefoot.sanitizer.rules.base import Findings, Rule, Site

LEAST = 2


class RngResetInLoop(Rule, page=__file__):
    """Global seed set after training began, or the state at an epoch's start seen before."""

    def setup(self) -> None:
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

    def on_optimizer_created(self, event: ev.OptimizerCreated) -> None:
        # Another training begins: a fold, a repetition.
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

    def findings(self) -> Findings:
        told = False
        for (site, seed), updates in self.resets.items():
            if len(set(updates)) >= LEAST:
                told = True
                message = (
                    f"torch.manual_seed({seed}) ran {len(updates)} times after training began, and"
                    " training went on from it."
                )
                yield self.report(
                    message, site, seed=seed, resets=len(updates), at_updates=updates[:20]
                )
        for site, count in self.repeats.items():
            if not told:
                message = (
                    f"{count} epochs started from a random state that an earlier epoch had started"
                    " from: the order of the data repeats."
                )
                yield self.report(message, site, repeats=count)
