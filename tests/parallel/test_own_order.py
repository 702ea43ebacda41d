"""Ranks whose sets and mappings have different orders train one run."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from parallel.rank_of_own_order import FACTORS, trained

SCRIPT = Path(__file__).with_name("rank_of_own_order.py")


def test_ranks_with_other_hashes_and_addresses_train_as_one_process(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    started = []
    for rank in range(2):
        own = {
            "PYTHONHASHSEED": str(rank + 1),
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        command = [sys.executable, str(SCRIPT), str(tmp_path / "runs"), str(tmp_path / f"{rank}")]
        started.append(subprocess.Popen(command, env={**os.environ, **own}))
    alone = trained(tmp_path / "alone", 1)
    assert [process.wait(120) for process in started] == [0, 0]
    first, second = (json.loads((tmp_path / f"{rank}").read_text()) for rank in range(2))
    assert first["weights"] == second["weights"]
    assert first["buffers"] == second["buffers"] == alone["buffers"]
    assert first["terms"] == pytest.approx(alone["terms"])
    assert first["metrics"] == pytest.approx(alone["metrics"])
    loss = first["metrics"]["validation/times_one"]
    for name, factor in FACTORS.items():
        assert first["metrics"][f"validation/times_{name}"] == pytest.approx(factor * loss)
