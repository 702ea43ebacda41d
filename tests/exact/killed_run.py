"""Runs a recipe in a process of its own that kills itself, without warning, at a chosen update.

Used as a program: `killed_run.py RUNS RESUME KILL_AT RECIPE [OVERRIDE ...]`, where RESUME is a run
folder or `-`, and KILL_AT the window after which the process gets SIGKILL, or 0 for never.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import torch

from surefoot.build import run_recipe
from surefoot.config.load import load_recipe
from surefoot.engine.reporting import ReportLog


def kill_after(window: int) -> None:
    """From outside the library: SIGKILL once that window has been settled."""
    settle = ReportLog.settle

    def settle_then_die(self: ReportLog) -> int:
        step = settle(self)
        if self.progress.window >= window:
            os.kill(os.getpid(), signal.SIGKILL)
        return step

    ReportLog.settle = settle_then_die  # type: ignore[method-assign]


def main() -> None:
    runs, resume, kill_at, recipe, *overrides = sys.argv[1:]
    torch.set_num_threads(1)
    if int(kill_at):
        kill_after(int(kill_at))
    result = run_recipe(
        load_recipe(recipe, ["log.console=off", *overrides]),
        run_root=Path(runs),
        resume=None if resume == "-" else Path(resume),
    )
    print(result.folder)


if __name__ == "__main__":
    main()
