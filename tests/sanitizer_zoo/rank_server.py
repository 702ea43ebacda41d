"""One rank of the scripts about ranks: runs each under the audit, in an interpreter that stays.

Started by `ranks.py`, one process a rank; reads a request a line and answers when it is done.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from pathlib import Path

import torch

from surefoot.sanitizer.request import Request
from surefoot.sanitizer.run import run_here


def serve() -> None:
    torch.set_num_threads(1)
    answers = sys.stdout
    for line in sys.stdin:
        request = json.loads(line)
        folder = Path(request["folder"])
        os.environ["RANKS_MEET_AT"] = str(folder / "meeting")
        with contextlib.redirect_stdout(sys.stderr):
            summary, code = run_here(Request(str(folder / "script.py")), folder)
        answer = {"code": code, "summary": summary.as_json()}
        print(json.dumps(answer, default=str), file=answers, flush=True)


if __name__ == "__main__":
    serve()
