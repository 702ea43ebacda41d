"""The run folder as each rank sees it: rank 0 owns it and writes; the other ranks are guests.

Both implement one protocol, so callers never ask which one they have. A guest writes no log and no
record; it only writes its parts of checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from surefoot.core.errors import CheckpointError, DataError, RankError, SurefootError
from surefoot.core.peaks import dense_peak
from surefoot.core.reports import Event, Observer
from surefoot.observe.bad_batches import keep_batch
from surefoot.observe.events import EventLog, read_events
from surefoot.observe.latest import LatestMetrics
from surefoot.observe.metrics_log import MetricsLog, last_step_row, refuse_misfit
from surefoot.observe.metrics_schema import number
from surefoot.observe.probes import ResourceProbe, UtilizationProbe
from surefoot.observe.run_folder import ARTIFACTS_NAME, CHECKPOINTS_NAME, RunFolder
from surefoot.parallel.ranks import Ranks, from_first
from surefoot.state.manifest import MALFORMED

Note = Callable[[str], None]


@dataclass(frozen=True)
class MeasuredRun:
    """What the columns of resources are measured on."""

    device: torch.device
    precision_name: str
    num_ranks: int
    flops_per_sample: float | None


class RunLogs(Protocol):
    """The logs of a run, as one rank keeps them."""

    @property
    def observers(self) -> tuple[Observer, ...]:
        """Those that write the logs; their errors are the run's errors."""
        ...

    def sync(self) -> int:
        """Writes all rows of the metrics through to the disk; the byte behind the last one."""
        ...

    def digest(self) -> str:
        """Hash of the rows of the metrics that `sync` has written."""
        ...

    def resume_at(self, offset: int) -> Path | None:
        """Goes on with the metrics behind `offset`; returns where later rows were moved."""
        ...

    def begin_anew(self) -> Path | None:
        """Goes on with an empty metrics log; returns where its rows were moved."""
        ...

    def close(self) -> None:
        """Ends what measures beside the run; the observers are closed by whoever tells them."""
        ...


class Folder(Protocol):
    """The run folder, as one rank has it."""

    path: Path
    checkpoints_path: Path
    artifacts_path: Path

    @property
    def attempt(self) -> str | int:
        """Name of this stretch of ownership."""
        ...

    def still_owner(self) -> bool:
        """Whether nobody has taken the folder since; asked before anything is published."""
        ...

    def on_owner(self, write: Callable[[RunFolder], object]) -> None:
        """Has `write` change the folder, on the one rank that owns it."""
        ...

    def past_events(self) -> Iterable[Event]:
        """What has happened to the run, as its owner knows it."""
        ...

    def last_seen(self) -> float:
        """Unix time of the last update in the metrics; 0 where there is none."""
        ...

    def metrics_at(self, offset: int, digest: str = "") -> tuple[dict[str, float], str]:
        """The latest metrics of the rows before `offset`; why the log does not fit, or nothing.

        Args:
            digest: of these rows as the run wrote them; empty where it is not known.
        """
        ...

    def open_logs(self, measured: MeasuredRun, note: Note, *, patient: bool) -> RunLogs:
        """The logs, to be written from now on; see `MetricsLog` for `patient`."""
        ...

    def keep_batch(
        self, event: Event, batches: Sequence[Any], facts: Mapping[str, object]
    ) -> Path | None:
        """Keeps the batches of an update that went wrong; None where they are not kept."""
        ...

    def close(self) -> None:
        """Gives the folder back; harmless when called twice."""
        ...


class OwnedFolder:
    """The run folder of the rank that owns it."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self.path = folder.path
        self.checkpoints_path = folder.checkpoints_path
        self.artifacts_path = folder.artifacts_path

    @property
    def attempt(self) -> str:
        return self._folder.lease.attempt

    def still_owner(self) -> bool:
        return self._folder.lease.still_owner()

    def on_owner(self, write: Callable[[RunFolder], object]) -> None:
        write(self._folder)

    def past_events(self) -> Iterable[Event]:
        path = self._folder.events_path
        return read_events(path) if path.is_file() else ()

    def last_seen(self) -> float:
        try:
            row = last_step_row(self._folder.metrics_path)
            return 0.0 if row is None else number(row["time"])
        except (OSError, ValueError, KeyError):
            # What is wrong with the log is said where the run looks for its place in it.
            return 0.0

    def metrics_at(self, offset: int, digest: str = "") -> tuple[dict[str, float], str]:
        path, latest = self._folder.metrics_path, LatestMetrics()
        try:
            refuse_misfit(path, offset, digest)
            if path.is_file():
                latest.read(path, offset)
        except (CheckpointError, DataError) as error:
            return {}, f"{error.what} ({error.where})"
        except MALFORMED as error:
            return {}, f"A row is malformed: {type(error).__name__}: {error} ({path})"
        return latest.values, ""

    def open_logs(self, measured: MeasuredRun, note: Note, *, patient: bool) -> RunLogs:
        return OwnedLogs(self._folder, measured, note, patient=patient)

    def keep_batch(
        self, event: Event, batches: Sequence[Any], facts: Mapping[str, object]
    ) -> Path | None:
        return keep_batch(self.artifacts_path, event, batches, facts)

    def close(self) -> None:
        self._folder.close()


class OwnedLogs:
    """Metrics and events of a run, and the probes of its device."""

    def __init__(
        self, folder: RunFolder, measured: MeasuredRun, note: Note, *, patient: bool
    ) -> None:
        self._utilization = UtilizationProbe(measured.device)
        peak = None
        if measured.device.type == "cuda":
            name = torch.cuda.get_device_name(measured.device)
            peak = dense_peak(name, measured.precision_name)
        resources = ResourceProbe(
            measured.device,
            lambda: self._utilization.energy_joules,
            measured.flops_per_sample,
            None if peak is None else peak * measured.num_ranks,
            note,
        )
        self._metrics = MetricsLog(folder.metrics_path, self._utilization, resources, patient, note)
        self._events = EventLog(folder.events_path, patient=patient)

    @property
    def observers(self) -> tuple[Observer, ...]:
        return self._metrics, self._events

    def sync(self) -> int:
        return self._metrics.sync()

    def digest(self) -> str:
        return self._metrics.digest()

    def resume_at(self, offset: int) -> Path | None:
        return self._metrics.resume_at(offset)

    def begin_anew(self) -> Path | None:
        return self._metrics.begin_anew()

    def close(self) -> None:
        self._utilization.close()


class GuestFolder:
    """The run folder of a rank that does not own it: it changes nothing there."""

    attempt = 0

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints_path = path / CHECKPOINTS_NAME
        self.artifacts_path = path / ARTIFACTS_NAME

    def still_owner(self) -> bool:
        return True

    def on_owner(self, write: Callable[[RunFolder], object]) -> None:
        return None

    def past_events(self) -> Iterable[Event]:
        return ()

    def last_seen(self) -> float:
        return 0.0

    def metrics_at(self, offset: int, digest: str = "") -> tuple[dict[str, float], str]:
        return {}, ""

    def open_logs(self, measured: MeasuredRun, note: Note, *, patient: bool) -> RunLogs:
        return NoLogs()

    def keep_batch(
        self, event: Event, batches: Sequence[Any], facts: Mapping[str, object]
    ) -> Path | None:
        return None

    def close(self) -> None:
        return None


class NoLogs:
    """The logs of a rank that keeps none."""

    observers: tuple[Observer, ...] = ()

    def sync(self) -> int:
        return 0

    def digest(self) -> str:
        return ""

    def resume_at(self, offset: int) -> Path | None:
        return None

    def begin_anew(self) -> Path | None:
        return None

    def close(self) -> None:
        return None


def take_folder(ranks: Ranks, make: Callable[[], RunFolder]) -> Folder:
    """Rank 0 makes or opens the folder of the run; the others hear where it is.

    Raises:
        SurefootError: rank 0 could not.
    """
    if ranks.size == 1:
        return OwnedFolder(make())
    folder: RunFolder | None = None
    answer: dict[str, str] = {}
    failure: SurefootError | None = None
    if ranks.rank == 0:
        try:
            folder = make()
            answer = {"path": str(folder.path.absolute())}
        except SurefootError as error:
            failure = error
    answer = from_first(ranks, "run folder", answer)
    if failure is not None:
        raise failure
    if "path" not in answer:
        raise RankError("rank 0 could not take the run folder", where=f"rank {ranks.rank}")
    return GuestFolder(Path(answer["path"])) if folder is None else OwnedFolder(folder)
