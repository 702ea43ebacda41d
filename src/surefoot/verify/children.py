"""Processes for trainings that are going to be killed. They are started clean, and never left.

On Linux a server imports torch once and forks each of them in a moment; elsewhere each starts
from nothing.
"""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from typing import Any

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
