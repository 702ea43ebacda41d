"""The numbers of a run as CSV, for a spreadsheet: a copy of the metrics log, never read back.

After a resume, rows beyond the checkpoint are dropped, so that each window appears once.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping
from pathlib import Path
from typing import IO

from surefoot.core.reports import EvalReport, StepReport
from surefoot.observe.files.atomic import atomic_write

UPDATES_NAME = "updates.csv"
EVALUATIONS_NAME = "evaluations.csv"


class CsvSink:
    """Writes `updates.csv` and `evaluations.csv` into the run folder, row by row.

    Evaluations have one row per metric. Numbers are written with `repr`, so they read back as the
    same float.

    Args:
        folder: the run folder.
    """

    def __init__(self, folder: Path) -> None:
        self._updates = _Table(folder / UPDATES_NAME, "window")
        self._evaluations = _Table(folder / EVALUATIONS_NAME, "step")

    def on_step(self, report: StepReport) -> None:
        row = {
            "window": report.window,
            "step": report.step,
            "epoch": report.epoch,
            "samples": report.samples,
            "tokens": report.tokens,
            "loss": report.loss,
            **{f"term/{name}": value for name, value in report.terms.items()},
            "grad_norm": report.grad_norm,
            "clipped": report.clipped,
            "applied": report.applied,
            **{f"lr/{name}": rate for name, rate in report.lr.items()},
            "step_seconds": report.step_seconds,
        }
        self._updates.write(row)

    def on_eval(self, report: EvalReport) -> None:
        for name, value in report.metrics.items():
            self._evaluations.write(
                {
                    "step": report.step,
                    "set": report.name,
                    "weights": report.weights,
                    "metric": name,
                    "value": value,
                }
            )

    def close(self) -> None:
        self._updates.close()
        self._evaluations.close()


class _Table:
    """A CSV file whose rows ascend in one column."""

    def __init__(self, path: Path, key: str) -> None:
        self._path = path
        self._key = key
        self._file: IO[str] | None = None
        self._names: list[str] = []

    def write(self, row: Mapping[str, object]) -> None:
        if self._file is None:
            self._file = self._opened(row)
        csv.DictWriter(self._file, self._names, extrasaction="ignore").writerow(row)
        self._file.flush()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _opened(self, first: Mapping[str, object]) -> IO[str]:
        """The file, without the rows from the first new one on: a resume writes them again."""
        self._names = list(first)
        kept: list[dict[str, str]] = []
        if self._path.is_file():
            with self._path.open(newline="", encoding="utf-8") as file:
                rows = csv.DictReader(file)
                self._names = list(rows.fieldnames or self._names)
                # A kill may have torn the last row: columns are missing.
                whole = [row for row in rows if row[self._names[-1]] is not None]
            kept = [row for row in whole if int(row[self._key]) < int(str(first[self._key]))]
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, self._names)
        writer.writeheader()
        writer.writerows(kept)
        atomic_write(self._path, text.getvalue())
        return self._path.open("a", newline="", encoding="utf-8")
