"""The run folder: the location of everything that one run leaves on disk.

Creates the folder, guards it against a second writer and writes its small files atomically.
Decides nothing about their content and never deletes what a run has written.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from types import TracebackType

import yaml

from surefoot.core.errors import RunFolderError
from surefoot.observe.files.atomic import atomic_write, fsync_directory, remove_leftovers
from surefoot.observe.files.lease import Lease
from surefoot.observe.files.lock import LOCK_NAME, is_in_use
from surefoot.observe.formatting import format_bytes

CONFIG_NAME = "config.yaml"
CONTRACT_NAME = "contract.yaml"
RECORD_NAME = "record.json"
METRICS_NAME = "metrics.jsonl"
EVENTS_NAME = "events.jsonl"
REPORT_NAME = "report.html"
CHECKPOINTS_NAME = "checkpoints"
ARTIFACTS_NAME = "artifacts"

_NAME_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
MAX_NAME_LENGTH = 120


class RunFolder:
    """A run folder that this process owns, until `close()` or its end.

    Create one with `create`, `create_at` or `open`; it is a context manager.
    """

    def __init__(self, path: Path, lease: Lease) -> None:
        # Absolute, since user code may change the working directory of the process.
        self.path = path
        self.lease = lease

    # -- making one ----------------------------------------------------------------------------

    @classmethod
    def create(
        cls, root: str | Path, name: str, *, started: datetime | None = None, needed_bytes: int = 0
    ) -> RunFolder:
        """Creates `root/2026-11-27T09-14-03_NAME/`, in local time, and takes it.

        A run of the same name started in the same second gets the suffix `-2`, so that many runs
        can start at once.

        Args:
            needed_bytes: what the run will write; compared with the free space before anything is
                created.

        Raises:
            RunFolderError: the name cannot be a folder's, the root cannot hold one, or there is too
                little free space.
        """
        check_name(name)
        stem = f"{(started or datetime.now()).strftime('%Y-%m-%dT%H-%M-%S')}_{name}"
        check_free_space(root, needed_bytes)
        suffix = ""
        count = 1
        while True:
            path = Path(root).absolute() / (stem + suffix)
            if _make_directory(path):
                return cls._furnish(path)
            count += 1
            suffix = f"-{count}"

    @classmethod
    def create_at(cls, path: str | Path, *, needed_bytes: int = 0) -> RunFolder:
        """Creates exactly this folder and takes it.

        Raises:
            RunFolderError: it already exists, its parent cannot hold it, or there is too little
                free space.
        """
        path = Path(path).absolute()
        if path.exists():
            raise RunFolderError(
                "The run folder exists already"
                + (", and a run is using it." if is_in_use(path) else "."),
                where=str(path),
                rule="a new run never writes into the folder of an old run",
                remedy="name another folder, or resume the run that is in it",
            )
        check_free_space(path.parent, needed_bytes)
        if not _make_directory(path):
            raise RunFolderError(
                "The run folder was created by another process at the same time.", where=str(path)
            )
        return cls._furnish(path)

    @classmethod
    def _furnish(cls, path: Path) -> RunFolder:
        lease = None
        try:
            lease = Lease(path)
            (path / CHECKPOINTS_NAME).mkdir()
            (path / ARTIFACTS_NAME).mkdir()
            fsync_directory(path)
            fsync_directory(path.parent)
            return cls(path, lease)
        except BaseException as error:
            # Nothing has been written yet: an empty folder would look like a run.
            if lease is not None:
                lease.release()
            shutil.rmtree(path, ignore_errors=True)
            if not isinstance(error, OSError):
                raise
            raise _cannot_be_made(path, error) from error

    @classmethod
    def open(
        cls,
        path: str | Path,
        *,
        needed_bytes: int = 0,
        tell: Callable[[str], None] = lambda text: None,
    ) -> RunFolder:
        """Takes an existing run folder, to resume its run.

        Args:
            needed_bytes: what the run will write at most.
            tell: called before a long wait: an owner on another machine is watched for a minute.

        Raises:
            RunFolderError: it is missing, is not a run folder, is in use (names the owner), or
                there is too little free space.
        """
        path = find_run(path).absolute()
        check_free_space(path, needed_bytes)
        lease = Lease(path, tell=tell)
        try:
            with naming_folder(path):
                # A copy of a run may lack folders that were empty.
                (path / CHECKPOINTS_NAME).mkdir(exist_ok=True)
                (path / ARTIFACTS_NAME).mkdir(exist_ok=True)
                remove_leftovers(path)
        except RunFolderError:
            lease.release()
            raise
        return cls(path, lease)

    # -- its places ----------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """Name of the folder, including the time."""
        return self.path.name

    @property
    def config_path(self) -> Path:
        return self.path / CONFIG_NAME

    @property
    def contract_path(self) -> Path:
        return self.path / CONTRACT_NAME

    @property
    def record_path(self) -> Path:
        return self.path / RECORD_NAME

    @property
    def metrics_path(self) -> Path:
        return self.path / METRICS_NAME

    @property
    def events_path(self) -> Path:
        return self.path / EVENTS_NAME

    @property
    def checkpoints_path(self) -> Path:
        return self.path / CHECKPOINTS_NAME

    @property
    def artifacts_path(self) -> Path:
        return self.path / ARTIFACTS_NAME

    # -- its small files -----------------------------------------------------------------------

    def write_config(self, config: str | Mapping[str, object]) -> None:
        """Writes `config.yaml`: YAML text (with its comments) or plain values."""
        atomic_write(self.config_path, _as_yaml(config))

    def write_contract(self, contract: str | Mapping[str, object]) -> None:
        """Writes `contract.yaml`: YAML text or plain values."""
        atomic_write(self.contract_path, _as_yaml(contract))

    def write_record(self, record: Mapping[str, object], *, name: str = RECORD_NAME) -> Path:
        """Writes `record.json` from plain JSON values. Returns its path."""
        text = json.dumps(record, indent=2, allow_nan=False, ensure_ascii=False)
        path = self.path / name
        atomic_write(path, text + "\n")
        return path

    # -- the end -------------------------------------------------------------------------------

    def close(self) -> None:
        """Releases the folder; idempotent."""
        self.lease.release()

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def find_run(path: str | Path) -> Path:
    """Returns `path` after checking that it is a run folder.

    Raises:
        RunFolderError: it is missing or not a run folder; suggests runs with a similar name.
    """
    path = Path(path)
    if not path.is_dir():
        likely = _similar(path)
        raise RunFolderError(
            f"The run folder {'is not a folder' if path.exists() else 'does not exist'}.",
            where=str(path),
            remedy=f"did you mean {likely}?" if likely else "name a folder that a run has left",
        )
    if not _is_run(path):
        raise RunFolderError(
            "The folder is not a run folder.",
            where=str(path),
            rule=f"a run folder holds {CONFIG_NAME} and {RECORD_NAME}",
            remedy="name the folder of one run, not the folder that holds the runs",
        )
    return path


def run_and_checkpoint(path: str | Path) -> tuple[Path, str | None]:
    """The run folder of `path`, and the name of the checkpoint if `path` is one of a run's."""
    path = Path(path)
    place = path.absolute().parent
    if place.name == CHECKPOINTS_NAME and _is_run(place.parent):
        return place.parent, path.absolute().name
    return path, None


def _is_run(path: Path) -> bool:
    return any((path / name).is_file() for name in (LOCK_NAME, CONFIG_NAME, RECORD_NAME))


def find_begun_run(path: str | Path) -> Path:
    """Returns `path` after checking that a run has begun in it.

    Raises:
        RunFolderError: as `find_run`, or the run ended before it wrote its configuration.
    """
    path = find_run(path)
    if not (path / CONFIG_NAME).is_file():
        if left := _left_by_training(path):
            raise RunFolderError(
                f"The run's {CONFIG_NAME} is missing; {left} remain.",
                where=str(path),
                rule=f"a run that can be resumed holds {CONFIG_NAME} and a checkpoint",
                remedy=f"restore {CONFIG_NAME} from a copy; its weights can still be used: "
                f"model.initial_weights={path}, or surefoot checkpoint export {path} --out DIR",
            )
        raise RunFolderError(
            "The run ended before it began: it has written no configuration.",
            where=str(path),
            rule=f"a run that can be resumed holds {CONFIG_NAME} and a checkpoint",
            remedy="start it again; the folder is empty and may be deleted",
        )
    return path


def config_of(run: str | Path) -> Path:
    """The configuration file of a run.

    Raises:
        RunFolderError: as `find_begun_run`.
    """
    return find_begun_run(run) / CONFIG_NAME


def read_config(run: str | Path) -> str:
    """The text of the configuration of a run that has begun.

    Raises:
        RunFolderError: as `find_begun_run`, or the file is not text.
    """
    path = config_of(run)
    try:
        text = path.read_text(encoding="utf-8")
        if not text.strip():
            raise ValueError("it is empty")
        return text
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else str(error)
        if isinstance(error, UnicodeDecodeError):
            why = "it is not UTF-8 text"
        raise RunFolderError(
            f"The run's {CONFIG_NAME} cannot be read: {why}.",
            where=str(path),
            rule=f"{CONFIG_NAME} is the configuration that the run was started with, as UTF-8 YAML",
            remedy="restore it from a copy",
        ) from error


def _left_by_training(path: Path) -> str:
    """What a run has left of its training, for a message; empty if nothing."""
    count = sum(1 for _ in (path / CHECKPOINTS_NAME).glob("step-*"))
    if count:
        return f"{count} checkpoint{'s' if count > 1 else ''} of it"
    metrics = path / METRICS_NAME
    return "rows of its metrics" if metrics.is_file() and metrics.stat().st_size else ""


def check_name(name: str) -> None:
    """Refuses a run name that cannot be part of a folder's name.

    Raises:
        RunFolderError: with the rule.
    """
    if not _NAME_PATTERN.fullmatch(name) or len(name) > MAX_NAME_LENGTH:
        raise RunFolderError(
            f"The run name {name!r} cannot be part of a folder's name.",
            where="name",
            rule=f"letters, digits, `.`, `_` and `-`, the first a letter or digit, at most "
            f"{MAX_NAME_LENGTH} characters",
        )


def check_free_space(path: str | Path, needed_bytes: int) -> None:
    """Refuses a start that would fill the disk of `path`, which need not exist yet.

    Raises:
        RunFolderError: says what is needed and what is free.
    """
    existing = Path(path).absolute()
    while not existing.exists():
        existing = existing.parent
    free_bytes = shutil.disk_usage(existing).free
    if free_bytes < needed_bytes:
        raise RunFolderError(
            f"Too little free space: {format_bytes(needed_bytes)} needed, "
            f"{format_bytes(free_bytes)} free.",
            where=str(path),
            rule="everything that a run will write must fit before it starts",
            remedy="free some space, keep fewer checkpoints, or name a folder on another disk",
        )


def _make_directory(path: Path) -> bool:
    """Makes the folder; False where it exists."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        os.mkdir(path)
    except FileExistsError:
        if path.is_dir():
            return False
        raise RunFolderError("The folder of the runs is a file.", where=str(path.parent)) from None
    except OSError as error:
        raise _cannot_be_made(path, error) from error
    return True


@contextmanager
def naming_folder(path: Path) -> Iterator[None]:
    """Context manager: errors of the disk are raised as errors of the run folder.

    Raises:
        RunFolderError: such as for a full disk.
    """
    try:
        yield
    except OSError as error:
        raise RunFolderError(
            f"The run folder cannot be written: {error.strerror or error}.",
            where=str(error.filename or path),
            rule="a run records what it is before it begins",
            remedy="free some space, or name a folder that can be written to",
        ) from error


def _cannot_be_made(path: Path, error: OSError) -> RunFolderError:
    return RunFolderError(
        f"The run folder cannot be created: {error.strerror}.",
        where=str(path),
        remedy="name a folder that you may write to, on a disk with space",
    )


def _similar(path: Path) -> Path | None:
    """The newest run beside `path` whose name contains the name that was asked for."""
    if not path.parent.is_dir() or not path.name:
        return None
    matches = sorted(p for p in path.parent.iterdir() if p.is_dir() and path.name in p.name)
    return matches[-1] if matches else None


def _as_yaml(content: str | Mapping[str, object]) -> str:
    if isinstance(content, str):
        return content if content.endswith("\n") else content + "\n"
    text: str = yaml.safe_dump(dict(content), sort_keys=False, allow_unicode=True)
    return text
