"""Runs clean and mutated scripts under the audit; tells findings, exit code and outcome of each.

Scripts of one process run in this one, scripts of two ranks in two interpreters that stay.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import runpy
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from sanitizer_zoo.mutants.outcome import with_footer
from sanitizer_zoo.ranks import NUM_RANKS, Ranks
from surefoot.core.finding import Finding
from surefoot.sanitizer.reports import merged_reports
from surefoot.sanitizer.request import Request
from surefoot.sanitizer.run import run_here
from surefoot.sanitizer.summary import Summary


@dataclass(frozen=True)
class Audited:
    """One run under the audit."""

    findings: list[Finding]
    code: int
    outcome: str
    internal_errors: list[str]


class Runner:
    """A context manager; the two ranks are started when first needed."""

    def __init__(self) -> None:
        self._ranks: Ranks | None = None
        self._folder = tempfile.TemporaryDirectory()
        self._count = 0

    def __enter__(self) -> Runner:
        torch.set_num_threads(1)
        return self

    def __exit__(self, *_: object) -> None:
        if self._ranks is not None:
            self._ranks.close()
        self._folder.cleanup()

    def audit(self, name: str, text: str, num_ranks: int) -> Audited:
        """Runs a text as the script of that name."""
        folder = self._written(name, text)
        if num_ranks == 1:
            with _quiet_in(folder):
                summary, code = run_here(Request(str(folder / "script.py")), folder)
            return Audited(
                summary.findings, code, _outcome(folder, num_ranks), summary.internal_errors
            )
        return self._audit_ranks(folder)

    def plain(self, name: str, text: str, num_ranks: int) -> tuple[int, str]:
        """Exit code and outcome of a script without the audit, where it is of one process."""
        if num_ranks > 1:
            audited = self.audit(name, text, num_ranks)
            return audited.code, audited.outcome
        folder = self._written(name, text)
        code = 0
        with _quiet_in(folder):
            try:
                runpy.run_path(str(folder / "script.py"), run_name="__main__")
            except Exception:
                code = 1
        return code, _outcome(folder, num_ranks)

    def _written(self, name: str, text: str) -> Path:
        self._count += 1
        folder = Path(self._folder.name) / f"{self._count}_{name}"
        folder.mkdir()
        (folder / "script.py").write_text(with_footer(text))
        return folder

    def _audit_ranks(self, folder: Path) -> Audited:
        if self._ranks is None:
            self._ranks = Ranks()
        for process in self._ranks.processes:
            assert process.stdin is not None
            process.stdin.write(json.dumps({"folder": str(folder)}) + "\n")
            process.stdin.flush()
        answers = []
        for process in self._ranks.processes:
            assert process.stdout is not None
            answers.append(json.loads(process.stdout.readline()))
        summaries = [Summary.from_json(answer["summary"]) for answer in answers]
        errors = [error for summary in summaries for error in summary.internal_errors]
        code = max(abs(answer["code"]) for answer in answers)
        return Audited(merged_reports(summaries), code, _outcome(folder, NUM_RANKS), errors)


@contextlib.contextmanager
def _quiet_in(folder: Path) -> Iterator[None]:
    """What runs here works in `folder` and is not heard."""
    before = os.getcwd()
    os.chdir(folder)
    try:
        with (
            contextlib.redirect_stdout(io.StringIO()),
            contextlib.redirect_stderr(io.StringIO()),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        os.chdir(before)


def _outcome(folder: Path, num_ranks: int) -> str:
    paths = [folder / f"script.{rank}" for rank in range(num_ranks)]
    return " ".join(path.read_text() for path in paths if path.exists())
