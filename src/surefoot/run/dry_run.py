"""One update and one evaluation batch of a run that is not begun: it leaves no trace."""

from __future__ import annotations

from surefoot.assembly.process import prepare_process
from surefoot.parallel.compilation import uncompiled
from surefoot.run.folder_run import RunResult
from surefoot.run.session import RunRequest, build


def try_once(asked: RunRequest) -> RunResult:
    """Builds everything and makes one update and, where there is a validation set, one evaluation.

    Raises:
        SurefootError: the run could not start.
    """
    assembly = build(asked, prepare_process(asked.resolved.settings)).assembly
    update = assembly.make_update()
    log = update.parts.log
    try:
        windows = assembly.open_windows(log.progress.cursor)
        with uncompiled(assembly.compilation.extent):
            update(next(windows))
        windows.close()
        step = log.settle()
        metrics = {} if log.latest is None else {"train/loss": log.latest.loss}
        metrics |= assembly.evaluate_one_batch()
    finally:
        assembly.close()
    return RunResult(
        None, "dry-run", "built, ran one update", step, metrics, assembly.material.model
    )
