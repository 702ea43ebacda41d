"""SF705: the data comes in the same order in every epoch."""

from __future__ import annotations

import itertools

from torch.utils.data import IterableDataset

from surefoot.sanitizer import events as ev
from surefoot.sanitizer import graph
from surefoot.sanitizer.matchers import fingerprints
from surefoot.sanitizer.rules.base import NOWHERE, Findings, Rule, Site

MOST_BATCHES = 4096
LEAST_PERIOD = 3
MOST_OUTPUTS = 16


class DataNoShuffle(Rule, page=__file__):
    """Training loader with SequentialSampler, or the same sequence of batches again."""

    def setup(self) -> None:
        self.sequential: dict[int, int] = {}
        self.sequence: list[int] = []
        self.site: Site = NOWHERE
        self.stateful = False
        self.outputs: set[int] = set()
        """Addresses of what the latest training forward gave."""

    def on_loader_started(self, event: ev.LoaderStarted) -> None:
        loader = event.owner
        if event.loader.sampler != "SequentialSampler" or isinstance(
            loader.dataset, IterableDataset
        ):
            return
        if event.loader.steps > 0 and (event.loader.num_batches or 0) > 1:
            self.sequential[event.loader.key] = event.loader.epochs

    def on_forward_begin(self, event: ev.ForwardBegin) -> None:
        if not event.grad_enabled or len(self.sequence) >= MOST_BATCHES:
            return
        self.stateful = self.stateful or self._carries_state(event)
        tensor = fingerprints.first_tensor(event.inputs)
        digest = None if tensor is None else fingerprints.of_batch(tensor, self.trace.deep)
        if digest is not None:
            self.sequence.append(digest)
            self.site = event.site

    def _carries_state(self, event: ev.ForwardBegin) -> bool:
        """Whether a tuple, or what the forward before gave, is handed on to this one."""
        others = event.inputs[1:]
        given = {
            t.data_ptr() for t in graph.tensors_in(others) if graph.is_readable(t) and t.numel()
        }
        return any(isinstance(a, tuple) for a in event.arguments[1:]) or bool(given & self.outputs)

    def on_forward_end(self, event: ev.ForwardEnd) -> None:
        if event.grad_enabled and not self.stateful:
            tensors = itertools.islice(graph.tensors_in(event.output), MOST_OUTPUTS)
            self.outputs = {t.data_ptr() for t in tensors if graph.is_readable(t) and t.numel()}

    def findings(self) -> Findings:
        if self.stateful:
            return
        for loader in self.trace.loaders:
            epochs = self.sequential.get(loader.key, 0)
            if epochs > 1 and loader.steps > 0:
                message = (
                    f"This DataLoader trained for {epochs} epochs in the order of its dataset"
                    " (SequentialSampler)."
                )
                yield self.report(message, loader.site, epochs=epochs, batches=loader.num_batches)
        period = _period(self.sequence)
        if period and not self.sequential:
            message = (
                f"The same {period} batches came in the same order"
                f" {len(self.sequence) // period} times."
            )
            yield self.report(
                message, self.site, batches=period, passes=len(self.sequence) // period
            )


def _period(sequence: list[int]) -> int:
    """Length of what the sequence repeats, from its start, at least twice; 0 for none."""
    if not sequence:
        return 0
    for period in range(LEAST_PERIOD, len(sequence) // 2 + 1):
        if sequence[period] != sequence[0] or len(set(sequence[:period])) < period:
            continue
        if all(sequence[i] == sequence[i - period] for i in range(period, len(sequence))):
            return period
    return 0
