"""Programs of tests in processes that are forked with torch loaded: each starts in a moment."""

from __future__ import annotations

import os
import runpy
import sys
import warnings
from pathlib import Path

import torch

from surefoot.verify.processes import child


def run_forked(
    program: Path, *arguments: str, folder: Path, strict: bool = False, timeout: float = 240
) -> tuple[int, str]:
    """Runs a Python file as `python FILE ARGUMENTS` in `folder` would.

    Args:
        folder: the working directory; what is printed is kept in a file there.
        strict: warnings are errors, as with `-W error`.
        timeout: seconds after which it is killed.

    Returns:
        The exit code, negative for a signal, and what it printed.
    """
    printed = folder / f"{program.stem}.printed"
    with child(_run, program, arguments, folder, strict, printed) as process:
        process.join(timeout)
        code = process.exitcode
    assert code is not None, f"{program} has run for {timeout:g} s"
    return code, printed.read_text(encoding="utf-8") if printed.exists() else ""


def _run(
    program: Path, arguments: tuple[str, ...], folder: Path, strict: bool, printed: Path
) -> None:
    os.chdir(folder)
    with printed.open("wb", buffering=0) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    torch.set_num_threads(1)
    if strict:
        warnings.simplefilter("error")
    sys.argv = [str(program), *arguments]
    sys.path.insert(0, str(program.parent))
    runpy.run_path(str(program), run_name="__main__")
