"""Commits a checkpoint: every rank writes to a temporary folder, one rename publishes it.

In order, on all ranks: agree on the attempt and on who writes what; write the pieces and make them
durable; report sizes and digests, or the error; rank 0 writes the state and the manifest, checks
that it still owns the run, renames the folder, and points `latest` at it. An error before the
rename, on any rank, undoes the attempt and is raised on all. A reader sees a complete checkpoint or
none, and older ones are never touched.
"""

from __future__ import annotations

import json
import os
import shutil
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from surefoot.core.disk import free_bytes, is_full, is_refused
from surefoot.core.errors import CheckpointError, DiskFullError, DiskRefusedError
from surefoot.parallel.ranks import OneRank, Ranks
from surefoot.state.durable import remove, rename, replace_text, sync_path, write_text
from surefoot.state.manifest import (
    MANIFEST_NAME,
    STEP_PREFIX,
    ChunkEntry,
    FileEntry,
    Manifest,
    TensorEntry,
    digest,
    step_name,
)
from surefoot.state.shards import Piece, choose_writers
from surefoot.state.stages import STAGES_KEY, joined
from surefoot.state.tensor_file import write_tensors
from surefoot.state.tree import KEY_SEPARATOR, RANKS_KEY

STATE_NAME = "state.json"
LATEST_NAME = "latest"
TENSOR_SUFFIX = ".safetensors"
TEMPORARY_SUFFIX = ".tmp"
REPLACED_SUFFIX = ".replaced.tmp"
SPARE_BYTES = 1 << 20
"""Free space required beyond the tensors: for the state, the manifest and the logs."""
OTHER_KIND, FAILING_KIND, FULL_KIND = ERROR_KINDS = ("other", "failing", "full")
ERRORS = (CheckpointError, DiskRefusedError, DiskFullError)
REMEDIES = (
    "see the rule, then resume",
    "check the disk or choose another one, then resume",
    "free some space or choose another disk, then resume",
)


@dataclass(frozen=True)
class Draft:
    """What one rank contributes to a checkpoint."""

    step: int
    pieces: Sequence[Piece]
    values: Mapping[str, Any]
    """JSON; what differs between ranks is below `RANKS_KEY`."""
    about: Mapping[str, Any]
    kind: str = "resumable"
    still_owner: Callable[[], bool] = field(default=lambda: True)
    """Whether this process still owns the run folder: an orphan must not publish."""
    trouble: Exception | None = None
    """An error that kept this rank from contributing, such as a full disk; raised on all."""
    free_bytes: int | None = None
    """Free space on the disk at the time of that error."""


def step_folder(checkpoints: Path, step: int) -> Path:
    """The folder of the checkpoint at `step`."""
    return checkpoints / step_name(step)


def commit(checkpoints: Path, draft: Draft, ranks: Ranks | None = None) -> Path:
    """Writes and publishes one checkpoint together with all other ranks; returns its folder.

    Raises:
        DiskFullError: there is too little space; nothing was published.
        CheckpointError: a rank could not write, or the run has another owner; nothing was
            published. Older checkpoints are untouched in either case.
    """
    return _Commit(checkpoints, draft, ranks or OneRank()).run()


class _Commit:
    def __init__(self, checkpoints: Path, draft: Draft, ranks: Ranks) -> None:
        self.draft = draft
        self.ranks = ranks
        self.checkpoints = checkpoints
        self.target = step_folder(checkpoints, draft.step)
        self.beside = self.target  # Gets the attempt in its name once all ranks agree on one.
        self.needed_bytes: int | None = None

    def run(self) -> Path:
        try:
            begun = self._together("begin", self._begin)
            held = {key: size for of_rank in begun for key, size in of_rank["held"].items()}
            self.needed_bytes = sum(held.values()) + SPARE_BYTES
            self.beside = self.target.with_name(
                f"{self.target.name}.{begun[0]['attempt']}{TEMPORARY_SUFFIX}"
            )
            self._refuse_full_disk()
            written = self._together("write", lambda: self._write(begun))
            self._together("publish", lambda: self._publish(begun, written))
        except BaseException:
            if self.ranks.rank == 0 and self.beside != self.target:
                shutil.rmtree(self.beside, ignore_errors=True)
            raise
        return self.target

    def _together(self, what: str, work: Callable[[], Any]) -> list[Any]:
        """Does this rank's part and gathers the others' results; any error is raised on all."""
        own: Exception | None = None
        answer: dict[str, Any]
        try:
            answer = {"done": work()}
        except Exception as error:
            own = error
            answer = {
                "error": str(error) or type(error).__name__,
                "kind": _kind(error),
                # Measured now: a moment later another program may have freed space.
                "free": self._free_at(error),
            }
        answers = self.ranks.gather(f"checkpoint {self.draft.step}: {what}", answer)
        failed = [(rank, a) for rank, a in enumerate(answers) if "error" in a]
        if failed:
            raise self._error(failed) from own
        return [answer["done"] for answer in answers]

    def _error(self, failed: Sequence[tuple[int, Mapping[str, Any]]]) -> CheckpointError:
        rank, first = failed[0]
        on = f" on rank {rank}" if self.ranks.size > 1 else ""
        # A failing disk is waited for only if nothing else is wrong.
        kind = min((ERROR_KINDS.index(answer["kind"]) for _, answer in failed), default=0)
        error = ERRORS[kind](
            f"the checkpoint at step {self.draft.step} could not be written{on}: {first['error']}",
            where=str(self.checkpoints),
            rule="a checkpoint is published complete or not at all; older ones are untouched",
            remedy=REMEDIES[kind],
        )
        if isinstance(error, DiskRefusedError):
            error.needed_bytes, error.free_bytes = self.needed_bytes, first["free"]
        return error

    def _free_at(self, error: Exception) -> int | None:
        if error is self.draft.trouble:
            return self.draft.free_bytes
        return free_bytes(self.checkpoints)

    def _begin(self) -> dict[str, Any]:
        if self.draft.trouble is not None:
            raise self.draft.trouble
        attempt = ""
        if self.ranks.rank == 0:
            attempt = uuid.uuid4().hex[:12]
            self.beside = self.target.with_name(f"{self.target.name}.{attempt}{TEMPORARY_SUFFIX}")
            # Without its parents: if the run folder is gone, it is not recreated.
            self.checkpoints.mkdir(exist_ok=True)
            self.beside.mkdir()
        pieces = {piece.key: piece for piece in self.draft.pieces}
        return {
            "attempt": attempt,
            "held": {key: piece.num_bytes for key, piece in pieces.items()},
            RANKS_KEY: self.draft.values.get(RANKS_KEY, {}),
            STAGES_KEY: self.draft.values.get(STAGES_KEY, {}),
        }

    def _refuse_full_disk(self) -> None:
        # One answer for all ranks: the disk of the run folder.
        free = self._together("space", lambda: shutil.disk_usage(self.checkpoints).free)[0]
        assert self.needed_bytes is not None
        if free < self.needed_bytes:
            error = DiskFullError(
                f"the checkpoint at step {self.draft.step} needs {self.needed_bytes:,} bytes, "
                f"{free:,} are free",
                where=str(self.checkpoints),
                rule="a checkpoint is started only if it fits; older ones are untouched",
                remedy="free some space, or keep fewer checkpoints (checkpoint.keep)",
            )
            error.needed_bytes, error.free_bytes = self.needed_bytes, free
            raise error

    def _write(self, begun: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Writes this rank's pieces, one file per top-level part of the state."""
        writers = choose_writers([b["held"] for b in begun])
        parts: dict[str, list[Piece]] = {}
        for piece in self.draft.pieces:
            if writers[piece.key] == self.ranks.rank:
                parts.setdefault(piece.name.split(KEY_SEPARATOR, 1)[0], []).append(piece)
        files: dict[str, Any] = {}
        tensors: list[list[Any]] = []
        for part, pieces in parts.items():
            path = self.beside / self._file_name(part)
            files[path.name] = asdict(write_tensors(path, {p.key: p.data for p in pieces}))
            for piece in pieces:
                dtype = str(piece.data.dtype).removeprefix("torch.")
                chunk = ChunkEntry(path.name, piece.key, *piece.box)
                tensors.append([piece.name, dtype, list(piece.shape), asdict(chunk)])
        return {"files": files, "tensors": tensors}

    def _file_name(self, part: str) -> str:
        if self.ranks.size == 1:
            return f"{part}{TENSOR_SUFFIX}"
        return f"{part}.rank-{self.ranks.rank:05d}{TENSOR_SUFFIX}"

    def _publish(
        self, begun: Sequence[Mapping[str, Any]], written: Sequence[Mapping[str, Any]]
    ) -> None:
        if self.ranks.rank != 0:
            return
        values = dict(self.draft.values)
        for of_rank in begun:
            values = joined(values, of_rank[STAGES_KEY])
        of_ranks = {key: v for b in begun for key, v in b[RANKS_KEY].items()}
        if of_ranks:
            values[RANKS_KEY] = of_ranks
        state = self.beside / STATE_NAME
        write_text(state, json.dumps(values, allow_nan=False))
        files = {n: FileEntry(**entry) for w in written for n, entry in w["files"].items()}
        files[STATE_NAME] = digest(state)
        about = {**self.draft.about, "attempt": begun[0]["attempt"], "ranks": self.ranks.size}
        manifest = Manifest(self.draft.step, self.draft.kind, files, _entries(written), about)
        write_text(self.beside / MANIFEST_NAME, manifest.as_json())
        sync_path(self.beside)
        if not self.draft.still_owner():
            raise CheckpointError(
                "this process no longer owns the run folder",
                rule="only the owner of a run publishes its checkpoints",
            )
        aside = self.target.with_name(f"{self.target.name}.{begun[0]['attempt']}{REPLACED_SUFFIX}")
        if os.path.lexists(self.target):
            # One of the same step, such as a damaged one before a fall-back. See `put_back`.
            rename(self.target, aside)
        try:
            rename(self.beside, self.target)
        except OSError:
            with suppress(OSError):
                os.rename(aside, self.target)
            raise
        sync_path(self.checkpoints)
        remove(aside, ignore_errors=True)
        point_at(self.checkpoints / LATEST_NAME, self.target.name)


def _entries(written: Sequence[Mapping[str, Any]]) -> dict[str, TensorEntry]:
    described: dict[str, tuple[str, tuple[int, ...]]] = {}
    chunks: dict[str, list[ChunkEntry]] = {}
    for name, dtype, shape, chunk in (entry for w in written for entry in w["tensors"]):
        described[name] = dtype, tuple(shape)
        chunks.setdefault(name, []).append(ChunkEntry(**chunk))
    return {name: TensorEntry(*described[name], tuple(chunks[name])) for name in sorted(chunks)}


def point_at(latest: Path, name: str) -> None:
    """Writes the name of the newest checkpoint, for people only. An error here does not undo a
    published checkpoint."""
    try:
        replace_text(latest, f"{name}\n")
    except OSError:
        with suppress(OSError):
            latest.with_name(f"{latest.name}{TEMPORARY_SUFFIX}").unlink()


def put_back(checkpoints: Path) -> None:
    """Restores a checkpoint whose replacement was interrupted between two renames.

    Only for the owner of the run, before it searches for its newest checkpoint.
    """
    for aside in checkpoints.glob(f"{STEP_PREFIX}*{REPLACED_SUFFIX}"):
        target = aside.with_name(aside.name.partition(".")[0])
        if not os.path.lexists(target):
            rename(aside, target)
            sync_path(checkpoints)


def _kind(error: Exception) -> str:
    cause = error.__cause__
    if isinstance(error, DiskFullError) or is_full(error) or is_full(cause):
        return FULL_KIND
    if isinstance(error, DiskRefusedError) or is_refused(error):
        return FAILING_KIND
    return OTHER_KIND
