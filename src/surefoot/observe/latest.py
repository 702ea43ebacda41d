"""The latest value of each metric of a run, over its resumes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from surefoot.core.reports import EvalReport, Observer
from surefoot.observe.metrics_log import read_rows
from surefoot.observe.metrics_schema import number


@dataclass
class LatestMetrics(Observer):
    """Remembers the latest evaluation of each set."""

    values: dict[str, float] = field(default_factory=dict)

    def read(self, metrics_log: Path, end: float = math.inf) -> None:
        """Reads the evaluations of a log before byte `end`."""
        for row in read_rows(metrics_log, end):
            if row["row"] == "eval" and isinstance(row["metrics"], Mapping):
                for name, value in row["metrics"].items():
                    self.values[f"{row['name']}/{name}"] = number(value)

    def on_eval(self, report: EvalReport) -> None:
        self.values |= {f"{report.name}/{name}": v for name, v in report.metrics.items()}
