"""Starts a model with BatchNorm on several ranks again and again, each rank with its own hash seed.

A script, not a test of the suite: `python tests/parallel/many_starts.py [STARTS] [RANKS ...]`.
Prints one line a start and ends with 1 where one failed.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

RECIPE = """
name: bn
model: {kind: mlp, hidden: [16], norm: batchnorm}
data: {kind: diabetes}
task: {kind: regression}
optimizer: {kind: sgd, lr: 0.01}
train: {horizon: 6 steps, micro_batch: 8}
log: {console: "off"}
"""
SECONDS = 240


def start(folder: Path, num_ranks: int, number: int) -> list[int]:
    """The exit codes of all ranks."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    (folder / "bn.yaml").write_text(RECIPE)
    started = []
    for rank in range(num_ranks):
        own = {
            "PYTHONHASHSEED": str(1 + number * num_ranks + rank),
            "OMP_NUM_THREADS": "1",
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(num_ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        command = [sys.executable, "-m", "surefoot", "train", "bn.yaml"]
        started.append(
            subprocess.Popen(
                command,
                cwd=folder,
                env={**os.environ, **own},
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        )
    return [process.wait(SECONDS) for process in started]


def main(starts: int = 20, *ranks: int) -> int:
    failed = 0
    for num_ranks in ranks or (2, 3):
        for number in range(starts):
            with tempfile.TemporaryDirectory() as folder:
                codes = start(Path(folder), num_ranks, number)
            failed += any(codes)
            print(f"{num_ranks} ranks, start {number + 1}: exit codes {codes}", flush=True)
    print(f"{failed} failed")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
