"""The reader of foreign checkpoints as the body of a forked process; it imports little."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

from surefoot.state import foreign_reader

CPU_SECONDS = 5


def read_apart(source: str, out: str, size: int) -> None:
    """Body of a process: the reader's own program, and how much memory it took at its peak."""
    before = peak_bytes()
    sys.argv = ["reader", source, out, str(size), str(CPU_SECONDS)]
    try:
        foreign_reader.main()
    finally:
        Path(out, "peak").write_text(str(peak_bytes() - before))


def peak_bytes() -> int:
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
