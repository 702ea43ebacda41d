"""Two interpreters that run scripts together as rank 0 and rank 1."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from surefoot.core.finding import Finding
from surefoot.sanitizer.reports import merged_reports
from surefoot.sanitizer.summary import Summary

SERVER = Path(__file__).with_name("rank_server.py")
NUM_RANKS = 2


class Ranks:
    """Started once; each script then costs no start of an interpreter."""

    def __init__(self) -> None:
        self.processes = [self._started(rank) for rank in range(NUM_RANKS)]

    def _started(self, rank: int) -> subprocess.Popen[str]:
        surroundings = {**os.environ, "RANK": str(rank), "WORLD_SIZE": str(NUM_RANKS)}
        return subprocess.Popen(
            [sys.executable, str(SERVER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=surroundings,
        )

    def findings_of(self, folder: Path) -> list[Finding]:
        """The merged findings on `folder`/script.py; fails where the script or the audit fails."""
        request = json.dumps({"folder": str(folder)})
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.write(request + "\n")
            process.stdin.flush()
        summaries = []
        for process in self.processes:
            assert process.stdout is not None
            answer = json.loads(process.stdout.readline())
            summary = Summary.from_json(answer["summary"])
            assert summary.internal_errors == [], "\n".join(summary.internal_errors)
            assert answer["code"] == 0
            summaries.append(summary)
        return merged_reports(summaries)

    def close(self) -> None:
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.close()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()
