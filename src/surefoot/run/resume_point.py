"""Which checkpoint a run goes on from, and what becomes of newer ones. It touches nothing live.

The newest one that is whole and whose place in the metrics log is there, or the one that was named.
Newer ones that the run does not go on from are put aside under a name that nobody counts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from surefoot.core.errors import CheckpointError
from surefoot.observe.files.atomic import free_name_beside
from surefoot.observe.run_folder import METRICS_NAME
from surefoot.parallel.ranks import Ranks
from surefoot.run.edits import METRICS_KEY
from surefoot.run.folder_roles import Folder
from surefoot.state.checkpoint import list_checkpoints, newest_whole, step_of
from surefoot.state.commit import LATEST_NAME, point_at
from surefoot.state.durable import rename
from surefoot.state.manifest import Manifest
from surefoot.state.run_state import naming_state
from surefoot.state.tree import Snapshot

ASIDE_WORD = "aside"


@dataclass(frozen=True)
class Wanted:
    """What was asked for: which checkpoint, and what may become of the log."""

    checkpoint: str | None = None
    """Name of the one to go on from; None for the newest."""
    last_step: float = math.inf
    """Checkpoints of later steps are not looked at."""
    may_begin_log_anew: bool = False
    """Whether a log that does not fit is put aside; otherwise an older checkpoint is tried."""


@dataclass(frozen=True)
class StartingPoint:
    """A checkpoint that a run can go on from."""

    path: Path
    manifest: Manifest
    snapshots: list[Snapshot]
    """One, until it is taken."""
    refused: tuple[CheckpointError, ...] = ()
    """What was wrong with newer ones."""
    newer: tuple[Path, ...] = ()
    """Newer ones that would be taken for the newest the next time: put them aside."""
    log_misfit: str = ""
    """Why the log begins anew; empty where it goes on."""
    latest: dict[str, float] = field(default_factory=dict)
    """The latest value of each metric at this point of the log."""

    def take_snapshot(self) -> Snapshot:
        """The state, once: it is as large as the model, and must not be held while it trains."""
        return self.snapshots.pop()


def find_starting_point(folder: Folder, ranks: Ranks, wanted: Wanted) -> StartingPoint:
    """The checkpoint to go on from; every rank finds the same one. Only reads.

    Raises:
        CheckpointError: there is none that is whole and fits the log; every refusal is listed.
    """
    checkpoints, last_step = folder.checkpoints_path, wanted.last_step
    if wanted.checkpoint is not None:
        last_step = step_of(_listed(checkpoints, wanted.checkpoint))
    refused: list[CheckpointError] = []
    misfits: list[Path] = []
    while True:
        try:
            path, manifest, snapshot, damaged = newest_whole(
                checkpoints, ranks, last_step=last_step
            )
        except CheckpointError as error:
            raise (_none_fits(folder, refused) if misfits else error) from None
        if wanted.checkpoint not in (None, path.name):
            raise damaged[0]
        refused += damaged
        with naming_state():
            offset = int(snapshot.values["log_offsets"]["metrics"])
            digest = str(manifest.about.get(METRICS_KEY) or "")
        latest, why = folder.metrics_at(offset, digest)
        why = ranks.gather(f"the log at {path.name}", why)[0]
        if not why or wanted.may_begin_log_anew:
            newer = misfits
            if wanted.checkpoint is not None:
                newer = [p for p in list_checkpoints(checkpoints) if step_of(p) > manifest.step]
            return StartingPoint(
                path, manifest, [snapshot], tuple(refused), tuple(newer), why, latest
            )
        misfits.append(path)
        refused.append(CheckpointError(f"{path.name} does not fit {METRICS_NAME}: {why}"))
        if wanted.checkpoint is not None:
            raise _none_fits(folder, refused)
        last_step = manifest.step - 1


def _listed(checkpoints: Path, name: str) -> Path:
    found = list_checkpoints(checkpoints)
    if checkpoints / name in found:
        return checkpoints / name
    raise CheckpointError(
        f"there is no checkpoint {name}",
        where=str(checkpoints),
        rule="a run goes on from a published checkpoint of its own",
        remedy=f"take one of {', '.join(path.name for path in found) or 'none: there is none'}; "
        "one that was put aside is renamed back first",
    )


def _none_fits(folder: Folder, refused: Sequence[CheckpointError]) -> CheckpointError:
    return CheckpointError(
        f"no whole checkpoint fits the run's {METRICS_NAME}"
        + "".join(f"\n{error}" for error in refused),
        where=str(folder.path / METRICS_NAME),
        rule="a resume goes on behind the rows that its checkpoint had",
        remedy=f"put {METRICS_NAME} back from a copy; or begin it anew, the old rows are put "
        f"aside: surefoot train --resume RUN --accept-change {METRICS_NAME}, in Python "
        f'fit(resume=RUN, accept=["{METRICS_NAME}"])',
    )


def put_aside(newer: Sequence[Path], point: Path) -> None:
    """Renames checkpoints so that nobody takes them for any; `latest` names `point` again.

    Cut short at any moment, what is left of them are the older ones.
    """
    for path in sorted(newer, key=step_of, reverse=True):
        rename(path, free_name_beside(path, ASIDE_WORD))
    point_at(point.with_name(LATEST_NAME), point.name)
