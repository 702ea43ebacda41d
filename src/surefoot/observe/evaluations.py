"""The latest evaluation of each validation set as a file of its own.

A copy of what the metrics log holds; never read back.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from surefoot.core.reports import EvalReport, Observer
from surefoot.observe.files.atomic import atomic_write
from surefoot.observe.metrics_log import strict


class EvaluationFiles(Observer):
    """Writes `evaluation-SET.json` into `folder` after each evaluation."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def on_eval(self, report: EvalReport) -> None:
        name = re.sub(r"[^A-Za-z0-9._-]", "-", report.name)
        fields = {
            "set": report.name,
            "step": report.step,
            "weights": report.weights,
            "samples": report.samples,
            "metrics": report.metrics,
            "seconds": report.seconds,
            "time": report.time,
        }
        text = json.dumps(strict(fields), indent=1, allow_nan=False)
        atomic_write(self._folder / f"evaluation-{name}.json", text + "\n")
