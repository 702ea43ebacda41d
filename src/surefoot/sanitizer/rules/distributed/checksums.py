"""What the rules about ranks share: digests of gradients and weights at sampled updates.

No communication: each rank writes down its own, and the audit compares them at the end.
"""

from __future__ import annotations

import hashlib
from abc import ABC
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from surefoot.sanitizer import events as ev
from surefoot.sanitizer.listener import Listener
from surefoot.sanitizer.names import parameters_of
from surefoot.sanitizer.rules.base import NOWHERE, Findings, Rule, Site
from surefoot.sanitizer.state import OptimizerState
from surefoot.sanitizer.trace import Trace

FIRST = 10
SAMPLE = 64
LEAST_UPDATES = 2
MOST_PARAMETERS = 256
ZERO = "zero"


def sampled(n: int) -> bool:
    """Whether update `n` (from 1) is one of those whose digests are taken."""
    return n <= FIRST or n & (n - 1) == 0 or (n - 1) & (n - 2) == 0


@dataclass
class OptimizerSums:
    """What one rank notes of one optimizer."""

    place: Site = NOWHERE
    gradients: dict[str, dict[str, str]] = field(default_factory=dict)
    """Digests of its gradients by name, for each sampled update."""
    weights: dict[str, dict[str, str]] = field(default_factory=dict)
    """The same of its weights, as the update found them."""
    windows: int = 0
    """Updates with a forward of a wrapped module since the update before."""
    unsynced: int = 0
    """Those of them whose last such forward had synchronisation off."""


class RankSums(Listener):
    """Digests of one rank, taken once for all rules that compare ranks."""

    def setup(self) -> None:
        self.optimizers: dict[int, OptimizerSums] = defaultdict(OptimizerSums)
        self.group: tuple[int, ...] = ()
        """Ranks that share gradients with this one; empty where nobody does."""
        self.averages_gradients = self.averages_weights = False
        self.wrapper_of: dict[int, int] = {}
        self.synchronised: dict[int, bool] = {}
        """Whether the latest forward of each wrapper will reduce, since the last update."""
        self._closure_of = 0
        """Key of the optimizer whose step runs a closure now."""
        self._found: dict[str, str] = {}
        """Its weights before that step."""

    def on_parallel_wrapped(self, event: ev.ParallelWrapped) -> None:
        self._share(event.ranks)
        self.averages_gradients = True
        key = self.trace.module_key(event.wrapper)
        for tensor in parameters_of(event.wrapper):
            self.wrapper_of[id(tensor)] = key

    def on_parallel_forward(self, event: ev.ParallelForward) -> None:
        self.synchronised[self.trace.module_key(event.wrapper)] = event.synchronises

    def on_collective(self, event: ev.Collective) -> None:
        if event.on_gradient:
            self._share(event.ranks)
            self.averages_gradients = True
        if event.on_weight and event.name == "broadcast" and not self.trace.updates:
            # Whoever starts from the same weights on all ranks means one model.
            self._share(event.ranks)
        if event.on_weight and event.name == "all_reduce" and self.trace.updates:
            self.averages_weights = True

    def _share(self, ranks: tuple[int, ...]) -> None:
        # Of several groups the largest is looked at.
        if len(ranks) > len(self.group):
            self.group = ranks

    def on_step_begin(self, event: ev.StepBegin) -> None:
        if not (dist.is_available() and dist.is_initialized()):
            return
        optimizer, n = event.optimizer, event.optimizer.steps + 1
        if event.closure:
            # The gradients are there only when the step ends.
            self._found = _digests(self.trace, optimizer)[1] if sampled(n) else {}
            self._closure_of = optimizer.key
            return
        self._note(optimizer, n, event.site, {})

    def on_step_end(self, event: ev.StepEnd) -> None:
        if self._closure_of == event.optimizer.key:
            self._closure_of = 0
            self._note(event.optimizer, event.optimizer.steps, event.site, self._found)

    def _note(self, optimizer: OptimizerState, n: int, site: Site, found: dict[str, str]) -> None:
        sums = self.optimizers[optimizer.key]
        wrappers = {self.wrapper_of.get(id(state.ref())) for state in optimizer.parameters[:32]}
        called = [self.synchronised.pop(w) for w in wrappers if w in self.synchronised]
        sums.windows += bool(called)
        sums.unsynced += bool(called) and not all(called)
        sums.place = site
        if sampled(n):
            sums.gradients[str(n)], weights = _digests(self.trace, optimizer)
            sums.weights[str(n)] = found or weights

    def facts(self) -> Any:
        """JSON-able; None where no other rank shares anything."""
        if len(self.group) < 2 or not self.optimizers:
            return None
        return {
            "group": list(self.group),
            "averages_gradients": self.averages_gradients,
            "averages_weights": self.averages_weights,
            "optimizers": {str(key): asdict(sums) for key, sums in self.optimizers.items()},
        }


def _digests(trace: Trace, optimizer: OptimizerState) -> tuple[dict[str, str], dict[str, str]]:
    gradients, weights = {}, {}
    count: Counter[str] = Counter()
    stride = max(1, len(optimizer.parameters) // MOST_PARAMETERS)
    for state in optimizer.parameters[::stride]:
        tensor = state.ref()
        # Shards (DTensor, flat parameters) differ by design.
        if tensor is None or type(tensor) not in (torch.Tensor, torch.nn.Parameter):
            continue
        name = trace.names.of(tensor)
        count[name] += 1
        if count[name] > 1:
            name = f"{name} ({count[name]})"
        weights[name] = _digest(tensor)
        if tensor.grad is not None:
            gradients[name] = _digest(tensor.grad)
    return gradients, weights


def _digest(tensor: torch.Tensor) -> str:
    value = tensor.detach()
    flat = (value.coalesce().values() if value.is_sparse else value).reshape(-1)
    sample = flat[:: max(1, flat.numel() // SAMPLE)][:SAMPLE]
    if sample.is_complex():
        sample = torch.view_as_real(sample)
    plain = sample.cpu().to(torch.float64)
    if not bool(plain.any()):
        return ZERO
    content = repr(tuple(tensor.shape)).encode() + plain.contiguous().numpy().tobytes()
    return hashlib.blake2b(content, digest_size=6).hexdigest()


class RankRule(Rule, ABC):
    """A rule that judges the digests of all ranks."""

    def setup(self) -> None:
        self.sums = self.use(RankSums)

    def facts(self) -> Any:
        return self.sums.facts()

    def findings(self) -> Findings:
        return ()


@dataclass(frozen=True)
class RankComparison:
    """One optimizer, on the ranks that share gradients."""

    ranks: tuple[int, ...]
    place: Site
    seen: int
    """Updates sampled on all of them."""
    shared: frozenset[str]
    """Parameters that have gradients on all of them."""
    unequal: frozenset[str]
    """Parameters whose gradients differ at most of those updates."""
    apart: frozenset[str]
    """Parameters whose weights differ at most of those updates."""
    began_apart: frozenset[str]
    """Parameters whose weights differed at the first of those updates."""
    reunited: frozenset[str]
    """Parameters whose weights differed and later were equal again: local SGD."""
    always_zero: frozenset[str]
    """Parameters whose sampled gradients were zero everywhere."""
    windows: int
    unsynced: int
    averages_gradients: bool
    averages_weights: bool

    @property
    def never_synchronises(self) -> bool:
        """Whether nearly every window ended with synchronisation off."""
        return self.windows > 0 and self.unsynced >= 0.9 * self.windows

    @property
    def named_ranks(self) -> str:
        return ", ".join(map(str, self.ranks))


def teams(facts: Mapping[int, Any]) -> Iterator[dict[int, Any]]:
    """Ranks that share gradients with each other and reported facts."""
    by_group: dict[tuple[int, ...], dict[int, Any]] = {}
    for rank, reported in sorted(facts.items()):
        by_group.setdefault(tuple(reported["group"]), {})[rank] = reported
    yield from (team for team in by_group.values() if len(team) > 1)


def comparisons(facts: Mapping[int, Any]) -> Iterator[list[RankComparison]]:
    """For each team, its optimizers."""
    for team in teams(facts):
        keys = set.intersection(*(set(reported["optimizers"]) for reported in team.values()))
        found = [_compare(team, key) for key in sorted(keys)]
        yield [comparison for comparison in found if comparison.seen >= LEAST_UPDATES]


def _compare(team: Mapping[int, Any], key: str) -> RankComparison:
    sums = [reported["optimizers"][key] for reported in team.values()]
    updates = sorted(set.intersection(*(set(s["gradients"]) for s in sums)), key=int)
    gradients = [[s["gradients"][n] for s in sums] for n in updates]
    weights = [[s["weights"][n] for s in sums] for n in updates]
    shared, zero = Counter[str](), Counter[str]()
    for tables in gradients:
        for name in set.intersection(*map(set, tables)):
            shared[name] += 1
            zero[name] += {table[name] for table in tables} == {ZERO}
    return RankComparison(
        ranks=tuple(team),
        place=Site(*sums[0]["place"]),
        seen=len(updates),
        shared=frozenset(shared),
        unequal=_mostly_unequal(gradients),
        apart=_mostly_unequal(weights),
        began_apart=frozenset(_unequal(weights[0])) if weights else frozenset(),
        reunited=_reunited(weights),
        always_zero=frozenset(name for name in shared if zero[name] == shared[name]),
        windows=sum(s["windows"] for s in sums),
        unsynced=sum(s["unsynced"] for s in sums),
        averages_gradients=any(reported["averages_gradients"] for reported in team.values()),
        averages_weights=any(reported["averages_weights"] for reported in team.values()),
    )


def _unequal(tables: list[dict[str, str]]) -> set[str]:
    names = set.intersection(*map(set, tables))
    return {name for name in names if len({table[name] for table in tables}) > 1}


def _mostly_unequal(updates: list[list[dict[str, str]]]) -> frozenset[str]:
    counts = Counter(name for tables in updates for name in _unequal(tables))
    least = max(LEAST_UPDATES, 0.5 * len(updates))
    return frozenset(name for name, count in counts.items() if count >= least)


def _reunited(updates: list[list[dict[str, str]]]) -> frozenset[str]:
    apart: set[str] = set()
    found: set[str] = set()
    for tables in updates:
        unequal = _unequal(tables)
        found |= apart - unequal
        apart |= unequal
    return frozenset(found)
