"""What makes several processes one run: all train the same, and stay equal while they do."""

from __future__ import annotations

import importlib.util
import platform
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import xxhash

from surefoot.assembly.material import Prepared
from surefoot.assembly.run_parts import Assembly
from surefoot.config.load import Resolved
from surefoot.core.errors import RankError
from surefoot.observe.time_ledger import Phase, TimeLedger
from surefoot.parallel.health import RankHealth, RankTimes
from surefoot.parallel.ranks import Ranks
from surefoot.run.run_facts import fingerprints_of

MOST_NAMED = 5
OTHERS_AWAITED = (Phase.LAUNCH, Phase.DEVICE_WAIT, Phase.CHECKPOINT)
"""Phases in which a rank waits for others too."""
INITIAL_WEIGHTS = "initial weights"
SEED_FIRST = "make the model from one seed on every rank: torch.manual_seed(0) before it is made"
PACKAGE = Path(__file__).parents[1]


def refuse_different_runs(
    resolved: Resolved[Any], prepared: Prepared, assembly: Assembly, initial_weights: str
) -> None:
    """Compares what the ranks are about to train; does nothing on one rank.

    Args:
        initial_weights: digest of the weights before the model was laid out.

    Raises:
        RankError: ranks differ in code, configuration, data or weights; the difference is named.
    """
    ranks = assembly.place.ranks
    if ranks.size == 1:
        return
    facts = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "code": digest_of_code(resolved.as_dict()),
        **{f"config {path}": repr(value) for path, value in _flat(resolved.as_dict())},
        **{f"data {name}": value for name, value in fingerprints_of(prepared, assembly).items()},
        "order of validation sets": ", ".join(assembly.material.validation),
        INITIAL_WEIGHTS: initial_weights,
    }
    refuse_differences(ranks, facts)


def refuse_differences(ranks: Ranks, facts: Mapping[str, str]) -> None:
    """Refuses facts that are not the same on all ranks.

    Raises:
        RankError: with the first facts that differ, and the value on each side.
    """
    gathered: list[dict[str, str]] = ranks.gather("the same run", dict(facts))
    differing = []
    for name in {name: None for of_rank in gathered for name in of_rank}:
        values = [of_rank.get(name, "missing") for of_rank in gathered]
        other = next((rank for rank, value in enumerate(values) if value != values[0]), None)
        if other is not None:
            differing.append(f"{name}: {values[0]} on rank 0, {values[other]} on rank {other}")
    if differing:
        more = len(differing) - MOST_NAMED
        raise RankError(
            f"the ranks are about to train different runs: {len(differing)} differences",
            where="; ".join(differing[:MOST_NAMED]) + (f"; and {more} more" if more > 0 else ""),
            rule="all ranks have the same code, configuration, data and first weights",
            remedy=SEED_FIRST
            if all(text.startswith(INITIAL_WEIGHTS) for text in differing)
            else "start every rank from the same files with the same arguments",
        )


def digest_of_code(config: Mapping[str, Any]) -> str:
    """Digest of our own files, and of the modules that a recipe names."""
    found = xxhash.xxh3_128()
    paths = sorted(PACKAGE.rglob("*.py"))
    for path in [*paths, *_named_modules(config)]:
        found.update(path.name.encode())
        found.update(path.read_bytes())
    return found.hexdigest()


def _named_modules(config: Mapping[str, Any]) -> Iterator[Path]:
    for target in _targets(config):
        module, colon, _ = target.partition(":")
        spec = importlib.util.find_spec(module) if colon else None
        if spec is not None and spec.origin is not None and spec.origin.endswith(".py"):
            yield Path(spec.origin)


def _targets(value: Any, key: str = "") -> Iterator[str]:
    """The names of the user's own code in a configuration, also inside lists."""
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield from _targets(item, name)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _targets(item, key)
    elif key in ("target", "loss", "weight") and isinstance(value, str):
        yield value


def _flat(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _flat(item, f"{path}.{key}" if path else str(key))
    else:
        yield path, value


def make_health(assembly: Assembly, ledger: TimeLedger, note: Callable[[str], None]) -> RankHealth:
    """What compares the ranks of a run now and then; `note` hears of a slow one."""

    def times() -> RankTimes:
        seconds = ledger.read().as_json()
        wall = seconds.pop("wall")
        for phase in OTHERS_AWAITED:
            del seconds[phase.label]
        forward = assembly.trainable.passing.ranks.forward_seconds()
        return RankTimes(wall, {**seconds, "forward": forward})

    named = list(assembly.material.model.named_parameters())
    return RankHealth(assembly.place.ranks, named, times, note)
