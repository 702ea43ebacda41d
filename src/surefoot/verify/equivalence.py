"""Whether other ways to compute a run give the run's numbers: on its own model and its own data.

The first window is passed by one process, plainly, and by each other way that the recipe could be
trained; the loss and the gradient of every parameter are compared. Both sides compute in float64,
where a mistake is far larger than rounding. Nothing is trained.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path

from surefoot.config.load import Resolved
from surefoot.config.sections import Recipe
from surefoot.core.errors import RequestError, SurefootError
from surefoot.parallel.launch import launch
from surefoot.parallel.mesh import AXES, resolve_sizes
from surefoot.verify.processes import child, error_of
from surefoot.verify.window_numbers import (
    ERROR_NAME,
    MODULE,
    AskedWindow,
    PassedWindow,
    pass_window_in_child,
    read_passed,
)

BOUNDS = {"float64": 1e-10, "float32": 1e-5, "bfloat16": 2e-2, "float16": 2e-2}
"""Least exact type computed with -> largest relative difference that rounding explains: some
hundred thousand roundings of float64, a hundred of the others."""
SMALL_GRADIENT = 0.1
"""A gradient counts as at least this share of the whole norm: one that is 0 in exact arithmetic
is the rounding of what cancelled."""
PLAIN = (
    "precision.dtype=fp32",
    "train.compile=off",
    "memory.recompute=none",
    "checkpoint.every=end",
    "ema.kind=off",
    "log.console=off",
    "log.tensorboard=false",
    *(f"parallel.{axis}=1" for axis in AXES),
)


class Way(Enum):
    """Another way to compute the same update."""

    ACCUMULATION = "accumulation"
    RECOMPUTE = "recompute"
    COMPILE = "compile"
    LAYOUT = "layout"


@dataclass(frozen=True, slots=True)
class Compared:
    """One way against the plain one."""

    way: Way
    how: str
    """What was changed."""
    loss_difference: float = 0.0
    """Relative."""
    largest_difference: float = 0.0
    """Of a gradient, relative to its norm."""
    of: str = ""
    """The parameter that it belongs to."""
    first_broken: str | None = None
    """The first tensor, in the order of the model, beyond the bound; `loss` and `samples` too."""
    not_compared: str = ""
    """Why it was not."""


@dataclass(frozen=True)
class Equivalence:
    """The answer."""

    bound: float
    computed_in: str
    """The least exact number type of the plain way."""
    stilled: tuple[str, ...]
    """Kinds of modules that were compared in evaluation mode."""
    left_out: Mapping[str, str]
    """Terms of the loss that were not compared, and why."""
    loss: float
    num_samples: int
    compared: tuple[Compared, ...]

    @property
    def passed(self) -> bool:
        return all(one.first_broken is None for one in self.compared)


def prove_equivalence(
    recipe: str,
    overrides: Sequence[str],
    resolved: Resolved[Recipe],
    folder: Path,
    *,
    num_ranks: int = 1,
    ways: Sequence[Way] = tuple(Way),
    tell: Callable[[str], None] = lambda text: None,
) -> Equivalence:
    """Compares in `folder`, which is there and empty.

    Args:
        recipe: file or name, with `overrides`; `resolved` is the same, loaded.
        num_ranks: of the layout that the recipe asks for; 1 leaves the layout out.
        ways: what is compared.
        tell: is told how far it is.

    Raises:
        SurefootError: the recipe cannot be trained, or not in float64.
        RequestError: its forward draws random numbers of its own, which no two ways share.
    """
    deadline_seconds = float(resolved.recipe.parallel.deadline.value)
    trial = _EquivalenceTrial(recipe, tuple(overrides), folder, tell, deadline_seconds)
    section, train = resolved.recipe.parallel, resolved.recipe.train
    data_ranks = resolve_sizes(section, num_ranks).data_parallel
    window = train.accumulation * data_ranks
    whole = (*PLAIN, f"train.accumulation={window}")
    plain = trial.passed("plain", whole, watches_types=True)
    again = trial.passed("plain again", whole, draws=1)
    bound = BOUNDS[plain.narrowest]
    if compare(Way.ACCUMULATION, "", plain, again, bound).first_broken is not None:
        raise RequestError(
            "the forward draws random numbers in evaluation mode too",
            where=resolved.recipe.name,
            rule="two ways are compared on the same numbers",
            remedy="draw in `train` mode only, or in the data, where it belongs to a sample",
        )
    found = []
    for way in ways:
        changes = _changes(way, resolved.recipe, window, num_ranks)
        if isinstance(changes, str):
            found.append(Compared(way, "", not_compared=changes))
            continue
        ranks = num_ranks if way is Way.LAYOUT else 1
        try:
            passed = trial.passed(way.value, (*whole, *changes), num_ranks=ranks)
        except SurefootError as error:
            if _is_asked_for(way, resolved.recipe):
                raise
            found.append(Compared(way, "", not_compared=error.what))
            continue
        how = ", ".join(changes) if way is not Way.LAYOUT else f"{num_ranks} ranks"
        found.append(compare(way, how, plain, passed, bound))
    return Equivalence(
        bound,
        plain.narrowest,
        plain.stilled,
        plain.left_out,
        plain.loss,
        len(plain.sample_ids),
        tuple(found),
    )


def _is_asked_for(way: Way, recipe: Recipe) -> bool:
    """Whether the recipe itself trains so: then that it cannot is no detail."""
    match way:
        case Way.RECOMPUTE:
            return recipe.memory.recompute != "none"
        case Way.COMPILE:
            return recipe.train.compile in ("blocks", "whole")
        case _:
            return True


def _changes(way: Way, recipe: Recipe, window: int, num_ranks: int) -> tuple[str, ...] | str:
    """Overrides that make a run go another way, or why there is none."""
    train = recipe.train
    match way:
        case Way.ACCUMULATION:
            if train.micro_batch % 2 == 0:
                halves = train.micro_batch // 2
                return f"train.micro_batch={halves}", f"train.accumulation={2 * window}"
            if window > 1:
                return f"train.micro_batch={train.micro_batch * window}", "train.accumulation=1"
            return "a window of one odd micro-batch is not split"
        case Way.RECOMPUTE:
            extent = recipe.memory.recompute
            return (f"memory.recompute={'blocks' if extent == 'none' else extent}",)
        case Way.COMPILE:
            return (f"train.compile={'blocks' if train.compile == 'blocks' else 'whole'}",)
        case Way.LAYOUT:
            if num_ranks == 1:
                return "one process is asked for; --nproc N compares N"
            sizes = resolve_sizes(recipe.parallel, num_ranks)
            return (
                f"train.accumulation={train.accumulation}",
                f"memory.recompute={recipe.memory.recompute}",
                *(f"parallel.{axis}={getattr(sizes, axis)}" for axis in AXES),
            )


def compare(way: Way, how: str, plain: PassedWindow, other: PassedWindow, bound: float) -> Compared:
    """Compares one way with the plain one; `bound` is relative."""
    if plain.sample_ids != other.sample_ids:
        return Compared(way, how, first_broken="samples")
    loss = abs(other.loss - plain.loss) / max(abs(plain.loss), bound)
    norms = {name: float(g.norm()) for name, g in plain.gradients.items()}
    least = SMALL_GRADIENT * math.sqrt(sum(norm * norm for norm in norms.values()))
    broken = "loss" if not loss <= bound else None
    largest, of = 0.0, ""
    for name in plain.names:
        ours, theirs = plain.gradients.get(name), other.gradients.get(name)
        if ours is None and theirs is None:
            continue
        if ours is None or theirs is None or ours.shape != theirs.shape:
            difference = math.inf
        else:
            scale = max(norms[name], least) or 1.0
            difference = float((theirs.to(ours.dtype) - ours).norm()) / scale
        # NaN is a difference too, and larger than any.
        if not difference <= largest:
            largest, of = difference, name
        if not difference <= bound and broken in (None, "loss"):
            broken = name
    return Compared(way, how, loss, largest, of, broken)


class _EquivalenceTrial:
    """Starts the processes of each way."""

    def __init__(
        self,
        recipe: str,
        overrides: tuple[str, ...],
        folder: Path,
        tell: Callable[[str], None],
        deadline_seconds: float,
    ) -> None:
        self._recipe = recipe
        self._overrides = overrides
        self._folder = folder
        self._tell = tell
        self._deadline_seconds = deadline_seconds

    def passed(
        self,
        name: str,
        changes: Sequence[str],
        *,
        num_ranks: int = 1,
        draws: int = 0,
        watches_types: bool = False,
    ) -> PassedWindow:
        """The window's numbers, computed with these changes.

        Raises:
            SurefootError: a process failed; what it said.
        """
        self._tell(name)
        folder = self._folder / name.replace(" ", "-")
        folder.mkdir()
        asked = AskedWindow(
            self._recipe, (*self._overrides, *changes), str(folder), draws, watches_types
        )
        failed = f"the window could not be passed ({name})"
        if num_ranks == 1:
            with child(pass_window_in_child, asked) as process:
                process.join()
                code = process.exitcode or 0
        else:
            path = folder / "asked.json"
            path.write_text(json.dumps(asdict(asked)), encoding="utf-8")
            ended = launch([MODULE, str(path)], num_ranks, self._deadline_seconds)
            code = ended.exit_code
        if code != 0:
            raise error_of(folder / ERROR_NAME, failed, code)
        return read_passed(folder)
