"""What may change when a run is resumed, and what may not. Compares; changes nothing.

Every field of a recipe is in one of three classes: safe (it cannot change a number that was
promised), to be accepted by name, or impossible (the state does not fit).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from enum import Enum
from pathlib import Path
from typing import Any

from surefoot.config.building import make_schedule
from surefoot.config.load import C, Difference, Resolved, differences
from surefoot.config.sections import Recipe, Settings
from surefoot.core.counting import Pace, updates_in
from surefoot.core.errors import (
    GO_ON_FROM_OLDER,
    CheckpointError,
    RequestError,
    RunFolderError,
)
from surefoot.core.reports import Event
from surefoot.core.schedules import Schedule, first_difference
from surefoot.observe.events import EventKind
from surefoot.observe.run_folder import CONFIG_NAME, METRICS_NAME
from surefoot.run.resume_point import Wanted
from surefoot.state.manifest import Manifest

BEGUN_FOR_KEY = "begun_for"
"""In `about`: the horizon that the run began with, in updates, of which shares are shares."""

COMPILATION_KEY = "compilation"
"""In `about`: what of the model was compiled when the run began."""
KEPT_BY_AUTO = ("train.compile", "train.channels_last")
"""Fields whose `auto` means, for a run that goes on, what it began with."""
ORDER_KEY = "order of the samples"
"""Among the fingerprints of the data: what a sampler other than `shuffled` does."""


class Tier(Enum):
    """What a resume keeps."""

    T0 = "T0"
    """Every bit of the state, at every update: the same topology and kernels of fixed order."""
    T1 = "T1"
    """Samples, random numbers and counts to the bit; weights as near as two uninterrupted runs."""
    T2 = "T2"
    """Another number of ranks: the global order of samples and the random numbers of each sample to
    the bit; the loss within the noise of another order of summation. Dropout is not promised."""
    T3 = "T3"
    """Another run from here on: a change of what it computes was accepted, such as of a rate or of
    the data. What is done stays as it is."""


def resume_tier(
    before: Mapping[str, Any],
    now: Mapping[str, Any],
    deterministic: bool,
    *,
    is_changed: bool = False,
) -> Tier:
    """What going on promises, by what two stretches of a run say about themselves.

    Args:
        before: `about` of the checkpoint.
        now: `about` of the process that goes on.
        deterministic: whether kernels of fixed order are asked for.
        is_changed: whether a change was accepted that makes other numbers.
    """
    if is_changed:
        return Tier.T3
    if before.get("ranks", 1) != now.get("ranks", 1) or before.get("mesh", {}) != now.get(
        "mesh", {}
    ):
        return Tier.T2
    same = all(before.get(name, now.get(name)) == now.get(name) for name in ("torch", "device"))
    fixed_order = deterministic or now.get("device") == "cpu"
    return Tier.T0 if same and fixed_order else Tier.T1


class ChangeClass(Enum):
    """What a change of one field means for a resume."""

    SAFE = "safe"
    ACCEPT = "needs --accept-change"
    IMPOSSIBLE = "impossible"


SAFE_FIELDS = (
    "name",
    "log.",
    "observers",
    "loader.",
    "checkpoint.",
    "guard.",
    "memory.",
    "parallel.",
    "train.horizon",
    "schedule.cooldown",
    "schedule.cooldown_start",
)
"""Where and when things are written, how samples are fetched, how long the run is, the cooldown of
a schedule whose cooldown was left to be decided, and how the model lies over ranks and memory: that
the global batch stays is checked apart."""

ACCEPT_FIELDS = (
    "seed",
    "device",
    "deterministic",
    "data.",
    "sampler.",
    "metrics",
    "task.",
    "optimizer.",
    "schedule.",
    "precision.",
    "train.",
    "evaluate.",
    "ema.",
    "early_stopping.",
    "contract.",
)
"""Each changes a number that the run would have had."""

IMPOSSIBLE_FIELDS = ("model.", "optimizer.kind", "ema.kind", "task.kind", "data.kind")
"""The saved tensors belong to these."""

EXCEPT_SAFE = ("model.initial_weights",)
"""Only read when a run begins."""

DECAYS_WITH_HORIZON = ("warmup_cosine", "warmup_linear", "one_cycle")


def classify(path: str, config: Recipe | Settings) -> ChangeClass:
    """The class of a change of the field at `path`."""
    if path in EXCEPT_SAFE:
        return ChangeClass.SAFE
    if path.startswith(IMPOSSIBLE_FIELDS):
        return ChangeClass.IMPOSSIBLE
    total = getattr(config.schedule, "total", "horizon")
    if path == "schedule.total" and total == "begun":
        return ChangeClass.SAFE
    decays = config.schedule.kind in DECAYS_WITH_HORIZON and total == "horizon"
    if path == "train.horizon" and decays:
        # The decay ends with the horizon: another horizon is another learning rate.
        return ChangeClass.ACCEPT
    return ChangeClass.SAFE if path.startswith(SAFE_FIELDS) else ChangeClass.ACCEPT


def changes_numbers(path: str, config: Recipe | Settings) -> bool:
    """Whether a change of the field at `path` gives a run other numbers; a contract only judges."""
    is_judged = path.startswith("contract.")
    return classify(path, config) is ChangeClass.ACCEPT and not is_judged


@dataclass(frozen=True)
class Resumption:
    """How a run is gone on with."""

    before: Settings
    """The settings that it was started (or last resumed) with."""
    changes: tuple[Difference, ...] = ()
    """Differences of the configuration, all of them safe or accepted."""
    accepted: tuple[str, ...] = ()
    """What may differ, by name; `data` stands for the content of the data sets."""
    checkpoint: str | None = None
    """Name of the one to go on from; None for the newest."""
    run: Path = Path()
    """The folder of the run."""
    is_changed: bool = False
    """Whether a change was accepted that makes other numbers."""
    written: Resolved[Any] | None = None
    """What the run's configuration file gives, which must be what the run wrote."""

    @property
    def wanted(self) -> Wanted:
        """Which checkpoint to go on from, and what may become of the metrics log."""
        return Wanted(self.checkpoint, may_begin_log_anew=METRICS_NAME in self.accepted)

    def event_data(self) -> dict[str, object]:
        """What the resume event says of it."""
        return {"changes": [str(change) for change in self.changes]}

    def begun_for(self, manifest: Manifest, pace: Pace) -> int | None:
        """The horizon that the run began with, in updates; None where that was a time."""
        found = manifest.about.get(BEGUN_FOR_KEY) or updates_in(self.before.train.horizon, pace)
        return found if isinstance(found, int) else None

    def check(
        self, manifest: Manifest, fingerprints: Mapping[str, str], schedule: Schedule, pace: Pace
    ) -> None:
        """Refuses to go on with other data, or with a schedule that rewrites the past.

        Raises:
            CheckpointError: a data set has changed and that was not accepted.
            RequestError: updates that are done would have had another rate.
        """
        recorded = manifest.about.get("data")
        if not isinstance(recorded, Mapping):
            raise CheckpointError(
                "the checkpoint does not say on what data it was trained",
                where="manifest.json: about.data",
                rule="a resume goes on with the same samples",
                remedy=f"{GO_ON_FROM_OLDER}; or begin from its weights with model.initial_weights",
            )
        # A set that is new decides, perhaps, which step was the best one so far.
        for name in (*recorded, *(name for name in fingerprints if name not in recorded)):
            was, now = recorded.get(name), fingerprints.get(name)
            what = name if name == ORDER_KEY else f"data set '{name}'"
            if was != now and "data" not in self.accepted:
                raise CheckpointError(
                    f"the {what} has changed since the checkpoint",
                    where=f"fingerprint {now}, was {was}",
                    rule="a resume goes on with the same samples",
                    remedy="bring the data back, or accept it with --accept-change data",
                )
        self._refuse_other_batch(manifest, pace)
        fields = ("schedule", "train.horizon")
        if any(_covers(name, f) or _covers(f, name) for name in self.accepted for f in fields):
            return
        before = make_schedule(self.before, pace, self.begun_for(manifest, pace), given=schedule)
        differing = first_difference(before, schedule, manifest.step)
        if differing is not None:
            raise RequestError(
                f"the schedule would have given update {differing} another learning rate",
                where="schedule",
                rule=f"a resume at step {manifest.step} does not rewrite what is done",
                remedy="let the change begin later (a cooldown may), or accept it with"
                " --accept-change schedule",
            )

    def _refuse_other_batch(self, manifest: Manifest, pace: Pace) -> None:
        # More ranks with the same accumulation make a larger update without a word changed.
        was, now = manifest.about.get("samples_per_update"), pace.samples_per_update
        fields = ("parallel", "train.micro_batch", "train.accumulation")
        accepted = any(_covers(name, field) for name in self.accepted for field in fields)
        if was is None or was == now or accepted:
            return
        raise RequestError(
            f"an update would take {now} samples, and took {was} before",
            where="micro-batch x accumulation x data-parallel ranks",
            rule="a resumed run keeps its global batch",
            remedy=f"change train.accumulation by {was}/{now}, or accept it with --accept-change "
            "parallel",
        )


def refuse_crash_loop(events: Iterable[Event], most: int, step: int) -> None:
    """Refuses a resume where the last ones have led to nothing.

    What a resume has led to is the checkpoint that the next one begins from, not an event that
    tells of a save: a save beside the training is told later, and a kill may come first.

    Args:
        events: everything that has happened to the run.
        most: resumes in a row from the same checkpoint.
        step: of the checkpoint that the resume would begin from.

    Raises:
        RunFolderError: there were so many.
    """
    resumes, failure = 0, ""
    for event in events:
        if event.kind == EventKind.RESUME:
            resumes = resumes + 1 if event.step == step else 0
        elif event.kind == EventKind.FAILURE:
            failure = event.message
        elif event.kind in (EventKind.FINISHED, EventKind.STOPPED):
            resumes, failure = 0, ""
    if resumes >= most:
        raise RunFolderError(
            f"the run was resumed {resumes} times without getting beyond step {step}",
            where=f"the last failure: {failure}" if failure else "it was killed without a word",
            rule=f"guard.restarts_without_progress is {most}",
            remedy="see events.jsonl for what ends it; then resume with a larger "
            "guard.restarts_without_progress",
        )


def accept_differences(
    before: Resolved[C], after: Resolved[C], accepted: Sequence[str]
) -> list[Difference]:
    """Compares the recipe (or settings) of a run with what it is resumed with.

    Args:
        before: what the run was started with.
        after: what it shall go on with.
        accepted: dotted paths (or sections) of fields that may differ.

    Returns:
        The differences, all of them safe or accepted.

    Raises:
        RequestError: a difference is neither (all of them are listed), or a name to accept is that
            of no field.
    """
    _check_names(accepted, before.as_dict(), after.as_dict())
    changes = differences(before.as_dict(), after.as_dict())
    refused = []
    for change in changes:
        if change.path in KEPT_BY_AUTO and change.after == "auto":
            continue
        kind = classify(change.path, after.recipe)
        is_accepted = any(_covers(name, change.path) for name in accepted)
        if kind is ChangeClass.IMPOSSIBLE or (kind is ChangeClass.ACCEPT and not is_accepted):
            refused.append(f"{change} ({kind.value})")
    if refused:
        raise RequestError(
            f"the recipe differs from that of the run in {len(refused)} fields that matter:\n  - "
            + "\n  - ".join(refused),
            where="the configuration of the run",
            rule="a resumed run is the same run",
            remedy="leave them, accept each by name (--accept-change FIELD; in Python "
            "accept=[FIELD]), or start a new run",
        )
    return changes


def _covers(accepted: str, path: str) -> bool:
    return path == accepted or path.startswith(f"{accepted}.")


def _check_names(accepted: Sequence[str], *configs: Mapping[str, Any]) -> None:
    """Refuses a name that is no field: with a typo, it would accept nothing in silence.

    Raises:
        RequestError: with the field that was likely meant.
    """
    known = {"data", METRICS_NAME, CONFIG_NAME}.union(*(_paths(config) for config in configs))
    for name in accepted:
        if name not in known:
            close = get_close_matches(name, sorted(known), n=1)
            raise RequestError(
                f"there is no field '{name}' that could differ",
                where="--accept-change",
                rule="a dotted path of the recipe, a section, `data`, "
                f"{METRICS_NAME} or {CONFIG_NAME}",
                remedy=f"did you mean {close[0]}?"
                if close
                else "`surefoot show config RECIPE` lists the fields",
            )


def _paths(config: Mapping[str, Any], above: str = "") -> set[str]:
    found = set()
    for name, value in config.items():
        found.add(f"{above}{name}")
        if isinstance(value, Mapping):
            found |= _paths(value, f"{above}{name}.")
    return found
