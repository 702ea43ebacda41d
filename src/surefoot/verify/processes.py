"""Processes for trainings that are going to be killed. They are started clean, and never left.

On Linux a server imports torch once and forks each of them in a moment; elsewhere each starts
from nothing.
"""

from __future__ import annotations

import json
import multiprocessing
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from surefoot.core.errors import SurefootError

PRELOADED = ("surefoot.build", "surefoot.verify.traced_run")


@contextmanager
def child(target: Callable[..., None], *arguments: Any) -> Iterator[BaseProcess]:
    """A running process; it is gone when the context ends, whatever happens."""
    context: Any
    if sys.platform.startswith("linux"):
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(list(PRELOADED))
    else:
        context = multiprocessing.get_context("spawn")
    process = context.Process(target=target, args=arguments)
    process.start()
    try:
        yield process
    finally:
        if process.is_alive():
            process.kill()
        process.join()
        process.close()


def write_error(path: Path, error: BaseException) -> None:
    """Leaves what ended a process for the one that started it."""
    told = {"what": f"{type(error).__name__}: {error}", "where": "", "rule": "", "remedy": ""}
    if isinstance(error, SurefootError):
        told = {name: getattr(error, name) for name in told}
    trace = "".join(traceback.format_exception(error))
    path.write_text(json.dumps({**told, "traceback": trace}), encoding="utf-8")


def error_of(path: Path, failed: str, code: int, output: str = "") -> SurefootError:
    """What ended a process, as its starter tells it.

    Args:
        path: where the process wrote its error, if it did.
        failed: what it was for, with "failed".
        code: its exit code; negative for a signal.
        output: where it printed.
    """
    if not path.exists():
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        return SurefootError(f"{failed}: its process ended with {how}", where=output)
    told = json.loads(path.read_text(encoding="utf-8"))
    error = SurefootError(
        f"{failed}: {told['what']}",
        where=told["where"],
        rule=told["rule"],
        remedy=told["remedy"],
    )
    error.add_note(told["traceback"])
    return error
