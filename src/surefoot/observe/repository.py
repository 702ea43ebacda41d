"""The code that ran: commit, branch and uncommitted changes of the git repository of a folder.

Only reads. A missing repository or a missing git is a recorded fact, never an error.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

MAX_DIFF_BYTES = 1 << 20
MAX_UNTRACKED_NAMES = 50
_TIMEOUT_SECONDS = 10


@dataclass(frozen=True, slots=True)
class RepositoryState:
    """State of the code; all None if unknown, with the `reason`."""

    commit: str | None = None
    branch: str | None = None
    """None on a detached head."""
    dirty: bool | None = None
    """Whether tracked files differ from the commit."""
    diff: bytes = b""
    """`git diff HEAD`, at most `MAX_DIFF_BYTES` of it."""
    diff_bytes: int = 0
    """Length of the full diff."""
    diff_sha256: str | None = None
    """Hash of the full diff; None if there is none."""
    untracked: tuple[str, ...] = field(default=())
    """Names only, at most `MAX_UNTRACKED_NAMES`: their content may be secret or huge."""
    untracked_count: int = 0
    reason: str | None = None


def repository_state(folder: Path) -> RepositoryState:
    """The state of the repository that holds `folder`."""
    try:
        _git(folder, "rev-parse", "--show-toplevel")
    except FileNotFoundError:
        return RepositoryState(reason="git is not installed")
    except subprocess.TimeoutExpired:
        return RepositoryState(reason="git did not answer")
    except subprocess.CalledProcessError as error:
        return RepositoryState(reason=_first_line(error.stderr) or "no git repository here")
    try:
        commit = _git(folder, "rev-parse", "HEAD").decode().strip()
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired):
        return RepositoryState(reason="the repository has no commit yet")
    try:
        branch = _git(folder, "rev-parse", "--abbrev-ref", "HEAD").decode().strip()
        diff, length, digest = _diff(folder)
        untracked = _git(folder, "ls-files", "--others", "--exclude-standard", "--full-name", ":/")
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        return RepositoryState(commit=commit, reason=f"git stopped answering: {error}")
    names = untracked.decode("utf-8", "replace").splitlines()
    return RepositoryState(
        commit=commit,
        branch=None if branch == "HEAD" else branch,
        dirty=length > 0,
        diff=diff,
        diff_bytes=length,
        diff_sha256=digest if length else None,
        untracked=tuple(names[:MAX_UNTRACKED_NAMES]),
        untracked_count=len(names),
    )


def _command(folder: Path, *arguments: str) -> list[str]:
    # Disables what the repository's configuration could start: hooks, monitors, pagers.
    return ["git", "--no-pager", "-c", "core.fsmonitor=false", "-C", str(folder), *arguments]


def _environment() -> dict[str, str]:
    quiet = {"GIT_OPTIONAL_LOCKS": "0", "GIT_TERMINAL_PROMPT": "0", "LC_ALL": "C"}
    # A hook or a wrapper may have set git variables that point to another repository.
    own = {k: v for k, v in os.environ.items() if k not in ("GIT_DIR", "GIT_WORK_TREE")}
    return own | quiet


def _git(folder: Path, *arguments: str) -> bytes:
    return subprocess.run(
        _command(folder, *arguments),
        env=_environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=_TIMEOUT_SECONDS,
        check=True,
    ).stdout


def _diff(folder: Path) -> tuple[bytes, int, str]:
    """The truncated diff against HEAD, its full length and its hash, in bounded memory."""
    options = ("diff", "HEAD", "--no-ext-diff", "--no-textconv", "--no-color", "--binary")
    kept = bytearray()
    length = 0
    digest = hashlib.sha256()
    with subprocess.Popen(
        _command(folder, *options),
        env=_environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as process:
        assert process.stdout is not None
        while chunk := process.stdout.read(1 << 16):
            digest.update(chunk)
            length += len(chunk)
            kept += chunk[: max(0, MAX_DIFF_BYTES - len(kept))]
    return bytes(kept), length, digest.hexdigest()


def _first_line(text: bytes) -> str:
    lines = text.decode("utf-8", "replace").strip().splitlines()
    return lines[0] if lines else ""
