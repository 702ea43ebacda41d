"""Proves on a recipe itself that a killed and resumed run is the run that was never killed.

Trains once without a pause and once with kills at random moments, and compares the hash of the
whole state, the sample ids and the rows of the metrics at every update. It writes into one folder
only, and changes nothing of the recipe but its length and how often it evaluates and saves.
"""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from surefoot.config.load import Resolved
from surefoot.config.sections import Recipe
from surefoot.core.errors import RequestError, SurefootError
from surefoot.observe.metrics_log import read_rows
from surefoot.observe.metrics_schema import deterministic
from surefoot.observe.run_folder import CHECKPOINTS_NAME, METRICS_NAME
from surefoot.run.resume_rules import Tier
from surefoot.state.checkpoint import list_checkpoints, newest_whole
from surefoot.verify.processes import child, error_of
from surefoot.verify.state_hash import differing_pieces
from surefoot.verify.traced_run import TracedRun, TracePoint, read_trace, run_traced

SAVE_EVERY = 3
EVALUATE_EVERY = 4
EVALUATION_BATCHES = 4
LEAST_UPDATES = SAVE_EVERY + 2
DELAY_UPDATES = 1.5
"""Longest delay of a kill, in updates: it may fall into the next update, or into a save."""
POLL_SECONDS = 0.05
DEADLINE_SECONDS = 600.0
"""Longest silence of a training before it is held to be stuck."""

OVERRIDES = (
    "log.console=off",
    "log.tensorboard=false",
    f"checkpoint.every={SAVE_EVERY} steps",
    # It is killed on purpose.
    "guard.restarts_without_progress=1000000",
)


@dataclass(frozen=True, slots=True)
class Kill:
    """One kill and where the run went on."""

    after_window: int
    """The window that was done when the clock of the kill was set."""
    delay_seconds: float
    """How long after it."""
    resumed_at: int
    """The window of the checkpoint; 0 where there was none and the run was begun anew."""


@dataclass(frozen=True, slots=True)
class StateDifference:
    """The first update at which the two runs differ."""

    window: int
    step: int
    pieces: tuple[str, ...]
    """Names of the tensors and parts of the state that differ; `sample ids`, `metrics`."""


@dataclass(frozen=True)
class ResumeProof:
    """The answer."""

    updates: int
    kills: tuple[Kill, ...]
    seed: int
    tier: Tier | None
    """None where the proof failed."""
    difference: StateDifference | None = None
    """The first difference, also where the tier allows it."""
    compared: int = 0
    """States that were compared."""

    @property
    def passed(self) -> bool:
        return self.tier is not None


def evaluation_override(recipe: Recipe) -> tuple[str, ...]:
    """Evaluates often enough that kills fall beside evaluations; never stays never."""
    if recipe.evaluate.every == "never":
        return ()
    return (f"evaluate.every={EVALUATE_EVERY} steps",)


def prove_resume(
    resolved: Resolved[Recipe],
    folder: Path,
    *,
    updates: int,
    kills: int,
    seed: int,
    tell: Callable[[str], None] = lambda text: None,
) -> ResumeProof:
    """Runs the proof in `folder`, which is there and empty.

    Args:
        resolved: the recipe, with `OVERRIDES`.
        updates: how many updates are looked at; fewer where the recipe ends before.
        kills: how many times the run is killed.
        seed: of the moments of the kills.
        tell: is told how far it is.

    Raises:
        SurefootError: the recipe cannot be trained, or a resume was refused.
    """
    trial = _ResumeTrial(resolved, folder, updates, tell)
    whole = trial.uninterrupted("whole")
    last = whole[-1].window
    moments = random.Random(seed)
    places = range(SAVE_EVERY, last)
    after = sorted(moments.sample(places, min(kills, len(places))))
    killed, done = trial.killed("killed", after, moments)
    difference = first_state_difference(whole, killed)
    if difference is None:
        difference = _final_difference(folder / "whole", folder / "killed")
    tier: Tier | None = Tier.T0
    if difference is not None:
        tier = None
        if not resolved.recipe.deterministic and _is_rounding(difference):
            # A device without deterministic kernels: is an uninterrupted run equal to itself?
            tell("the states differ; training once more without a kill")
            again = first_state_difference(whole, trial.uninterrupted("again"))
            if again is not None and again.window <= difference.window:
                tier = Tier.T1
    return ResumeProof(last, tuple(done), seed, tier, difference, len(killed))


def first_state_difference(
    whole: list[TracePoint], other: list[TracePoint]
) -> StateDifference | None:
    """The earliest window at which a point of `other` is not that of `whole`."""
    expected = {point.window: point for point in whole}
    worst: StateDifference | None = None
    for point in other:
        twin = expected.get(point.window)
        if twin is None:
            continue
        pieces = [
            name
            for name in sorted(point.pieces.keys() | twin.pieces.keys())
            if point.pieces.get(name) != twin.pieces.get(name)
        ]
        if point.ids and twin.ids and point.ids != twin.ids:
            pieces.insert(0, "sample ids")
        if pieces and (worst is None or point.window < worst.window):
            worst = StateDifference(point.window, point.step, tuple(pieces))
    return worst


def _is_rounding(difference: StateDifference) -> bool:
    """Whether only tensors of weights differ: no count, no sample, no random number."""
    return all(
        not name.endswith(".json") and not name.startswith("rng") and "/" in name
        for name in difference.pieces
    )


def _final_difference(whole: Path, killed: Path) -> StateDifference | None:
    """Compares what the two runs have left: each row once and equal, and the last checkpoint."""
    rows, others = _rows(whole), _rows(killed)
    for ours, theirs in zip(rows, others, strict=False):
        if ours != theirs:
            columns = sorted(k for k in {*ours, *theirs} if ours.get(k) != theirs.get(k))
            step = int(ours["step"])
            named = tuple(f"{METRICS_NAME}: {column}" for column in columns)
            return StateDifference(int(ours.get("window", step)), step, named)
    _, manifest, left, _ = newest_whole(whole / CHECKPOINTS_NAME)
    _, _, other, _ = newest_whole(killed / CHECKPOINTS_NAME)
    pieces = differing_pieces(left, other)
    if len(rows) != len(others):
        pieces.insert(0, f"{METRICS_NAME}: {len(others)} rows, not {len(rows)}")
    if not pieces:
        return None
    return StateDifference(int(rows[-1]["step"]), manifest.step, tuple(pieces))


def _rows(run: Path) -> list[dict[str, Any]]:
    return [deterministic(row) for row in read_rows(run / METRICS_NAME)]


class _ResumeTrial:
    """Starts the trainings and watches them."""

    def __init__(
        self,
        resolved: Resolved[Recipe],
        folder: Path,
        updates: int,
        tell: Callable[[str], None],
    ) -> None:
        self._folder = folder
        self._updates = updates
        self._tell = tell
        self._seconds_per_update = 0.0
        (folder / "recipe.yaml").write_text(resolved.as_yaml(), encoding="utf-8")

    def uninterrupted(self, name: str) -> list[TracePoint]:
        """The points of a run without a kill.

        Raises:
            RequestError: the run is too short to be killed.
            SurefootError: the training failed by itself.
        """
        asked = self._asked(name, 0)
        self._train(asked, f"the {name} run", "the training failed without any kill")
        points = read_trace(Path(asked.trace))
        if len(points) < LEAST_UPDATES:
            raise RequestError(
                f"the run ends after {len(points)} updates",
                where="train.horizon",
                rule=f"a proof needs {LEAST_UPDATES} updates: one must be saved, another lost",
                remedy="give a longer horizon with --set train.horizon=...",
            )
        spent = points[-1].seconds - points[0].seconds
        self._seconds_per_update = spent / (len(points) - 1)
        return points

    def killed(
        self, name: str, after: Sequence[int], moments: random.Random
    ) -> tuple[list[TracePoint], list[Kill]]:
        """The points of all attempts of a run that is killed after these windows, and the kills."""
        seen: list[TracePoint] = []
        kills: list[Kill] = []
        dead: TracedRun | None = None
        for attempt, window in enumerate([*after, None]):
            folder = self._folder / name
            resume = bool(list_checkpoints(folder / CHECKPOINTS_NAME))
            if folder.exists() and not resume:
                # Killed before its first checkpoint: like a person, begin anew.
                folder.rename(self._folder / f"{name}-{attempt}")
            delay = moments.uniform(0.0, DELAY_UPDATES) * self._seconds_per_update
            asked = replace(
                self._asked(name, attempt),
                resume=resume,
                kill_after_window=window,
                kill_delay_seconds=delay,
            )
            failed = f"the resume after kill {len(kills) + 1} failed"
            alive = self._train(asked, f"the run killed {attempt} times", failed)
            found = read_trace(Path(asked.trace))
            if dead is not None and dead.kill_after_window is not None:
                begun = found[0].window if found else 0
                kills.append(Kill(dead.kill_after_window, dead.kill_delay_seconds, begun))
            seen += found
            dead = asked
            if alive:
                break
        return seen, kills

    def _asked(self, name: str, attempt: int) -> TracedRun:
        stem = self._folder / f"{name}-attempt-{attempt}"
        return TracedRun(
            recipe=str(self._folder / "recipe.yaml"),
            folder=str(self._folder / name),
            trace=f"{stem}.trace.jsonl",
            output=f"{stem}.output.txt",
            error=f"{stem}.error.json",
            last_window=self._updates,
            evaluation_batches=EVALUATION_BATCHES,
        )

    def _train(self, asked: TracedRun, label: str, failed: str) -> bool:
        """Runs to the end or to the kill; returns whether it came to its end.

        Raises:
            SurefootError: it failed, or was silent for too long.
        """
        trace, size, heard = Path(asked.trace), -1, time.monotonic()
        with child(run_traced, asked) as process:
            while process.is_alive():
                process.join(POLL_SECONDS)
                now = trace.stat().st_size if trace.exists() else 0
                if now != size:
                    size, heard = now, time.monotonic()
                    points = read_trace(trace)
                    done = points[-1].window if points else 0
                    self._tell(f"{label}: update {done} of {self._updates}")
                if time.monotonic() - heard > DEADLINE_SECONDS:
                    raise SurefootError(
                        f"{failed}: it has done nothing for {DEADLINE_SECONDS:g} s",
                        where=asked.output,
                        rule="a training that is watched goes on",
                        remedy="look at what it printed; --out DIR keeps it",
                    )
            code = process.exitcode
        if code == -signal.SIGKILL and asked.kill_after_window is not None:
            return False
        if code != 0:
            raise error_of(Path(asked.error), failed, code or 0, asked.output)
        return True
