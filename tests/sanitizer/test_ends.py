"""However a script ends, the audit tells what it saw and passes the script's exit code on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

LOOP = """
import os, signal, sys, threading, torch
from torch import nn
torch.manual_seed(0)
model = nn.Linear(3, 1)
opt = torch.optim.SGD(model.parameters(), lr=0.1)
def train(steps=6):
    for step in range(steps):
        opt.zero_grad()
        model(torch.randn(4, 3)).mean().backward()
        opt.step()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
"""
CLIP_LINE = 12


class Ended:
    """One run of the command on a script."""

    def __init__(self, folder: Path, source: str, *options: str, **how: object) -> None:
        script = folder / "loop.py"
        script.write_text(source)
        answer = folder / "answer.json"
        done = subprocess.run(
            [*COMMAND, "--json", str(answer), *options, str(script)],
            capture_output=True,
            text=True,
            timeout=120,
            cwd=folder,
            **how,  # type: ignore[call-overload]
        )
        self.code, self.out, self.err = done.returncode, done.stdout, done.stderr
        self.facts = json.loads(answer.read_text())

    @property
    def found(self) -> list[tuple[str, int]]:
        return [(finding["slug"], finding["line"]) for finding in self.facts["findings"]]


COMMAND = [sys.executable, "-m", "surefoot", "audit"]
ENDS = {
    "completes": ("train()", 1, "completed"),
    "exits with 0": ("train(); sys.exit()", 1, "completed"),
    "exits with a number": ("train(); sys.exit(7)", 7, "crashed"),
    "exits with a string": ("train(); sys.exit('no more')", 1, "crashed"),
    "exits with more than a byte": ("train(); sys.exit(256 + 9)", 9, "crashed"),
    "crashes": ("train(); [][1]", 1, "crashed"),
    "leaves by os._exit": ("train(); os._exit(5)", 5, "crashed"),
    "kills itself": ("train(); os.kill(os.getpid(), signal.SIGKILL)", 137, "killed"),
    "raises a signal": ("train(); signal.raise_signal(signal.SIGTERM)", 143, "killed"),
    "aborts": ("train(); os.abort()", 134, "killed"),
    "is interrupted": ("train(); raise KeyboardInterrupt", 130, "interrupted"),
    "ends in a thread": ("threading.Timer(0.5, train).start()", 1, "completed"),
    "closes its output": ("train(); sys.stdout.close()", 1, "completed"),
    "swallows all": ("try:\n    train(); sys.exit(3)\nexcept BaseException: pass", 1, "completed"),
}  # fmt: skip


OFTEN = ("completes", "exits with a number", "crashes", "kills itself", "is interrupted")


@pytest.mark.parametrize(
    "end", [e if e in OFTEN else pytest.param(e, marks=pytest.mark.slow) for e in ENDS]
)
def test_the_code_is_passed_on_and_the_findings_are_kept(tmp_path: Path, end: str) -> None:
    source, code, outcome = ENDS[end]
    ended = Ended(tmp_path, LOOP + source)
    assert (ended.code, ended.facts["outcome"]) == (code, outcome)
    assert ended.found == [("clip-after-step", CLIP_LINE)]
    assert ended.facts["internal_errors"] == []


def test_what_a_script_prints_at_its_end_is_printed(tmp_path: Path) -> None:
    assert "no more" in Ended(tmp_path, "import sys, torch; sys.exit('no more')").err
    crash = Ended(tmp_path, "import torch\ndef f():\n    raise ValueError('of mine')\nf()")
    assert "ValueError: of mine" in crash.err
    assert "surefoot" not in crash.err


def test_its_own_hook_sees_the_error(tmp_path: Path) -> None:
    source = "import sys, torch\nsys.excepthook = lambda *e: print('hooked', e[0].__name__)\n1 / 0"
    ended = Ended(tmp_path, source)
    assert (ended.code, "hooked ZeroDivisionError" in ended.out) == (1, True)


FORKS = """
pid = os.fork()
if pid == 0:
    {child}
else:
    train()
    os.waitpid(pid, 0)
    print("parent", os.getpid() == int(sys.argv[0] and os.getpid()))
"""


@pytest.mark.parametrize(
    "child",
    [
        "sys.exit(4)",
        pytest.param("pass", marks=pytest.mark.slow),
        pytest.param("os._exit(4)", marks=pytest.mark.slow),
        pytest.param("os.kill(os.getpid(), 9)", marks=pytest.mark.slow),
        pytest.param("raise ValueError", marks=pytest.mark.slow),
    ],
)
def test_a_forked_child_is_no_second_run(tmp_path: Path, child: str) -> None:
    ended = Ended(tmp_path, LOOP + FORKS.format(child=child))
    assert (ended.code, ended.facts["outcome"], ended.facts["processes"]) == (1, "completed", 1)
    assert ended.found == [("clip-after-step", CLIP_LINE)]
    assert ended.out.count("updates seen") == 1


def test_what_a_forked_child_trains_is_seen(tmp_path: Path) -> None:
    source = "if os.fork() == 0:\n    train()\nelse:\n    os.wait()"
    ended = Ended(tmp_path, LOOP + source)
    assert ended.found == [("clip-after-step", CLIP_LINE)]


def test_standard_input_is_the_scripts(tmp_path: Path) -> None:
    ended = Ended(tmp_path, LOOP + "train(int(input())); print('read', input())", input="8\nmore\n")
    assert (ended.facts["updates"], "read more" in ended.out) == (8, True)


def test_modules_may_be_redefined(tmp_path: Path) -> None:
    (tmp_path / "shadows").mkdir()
    (tmp_path / "shadows" / "json.py").write_text("dumps = None")
    source = """
sys.path.insert(0, os.path.join(os.getcwd(), "shadows"))
del sys.modules["json"]
import json
import importlib, types, torch.nn.functional as F
F.cross_entropy = lambda *a: None
nn.utils.clip_grad_norm_, kept = (lambda p, n: kept(p, n)), nn.utils.clip_grad_norm_
sys.modules["surefoot"] = types.ModuleType("surefoot")
importlib.reload(importlib.import_module("torch.optim.lr_scheduler"))
train()
del sys.modules["torch"]
sys.exit = os._exit = print
"""
    ended = Ended(tmp_path, LOOP + source)
    assert (ended.code, ended.facts["outcome"]) == (1, "completed")
    assert [slug for slug, _ in ended.found] == ["clip-after-step"]


def test_a_script_that_never_loads_torch_runs(tmp_path: Path) -> None:
    ended = Ended(tmp_path, "import sys\nprint('torch' in sys.modules, __name__)\nsys.exit(3)")
    assert (ended.code, ended.facts["updates"], ended.found) == (3, 0, [])
    assert "False __main__" in ended.out


def test_what_is_set_before_torch_is_loaded_takes_effect(tmp_path: Path) -> None:
    source = "import os\nos.environ['OMP_NUM_THREADS'] = '1'\nimport torch\n"
    ended = Ended(tmp_path, source + "print('threads', torch.get_num_threads())")
    assert "threads 1\n" in ended.out


def test_the_script_sees_what_it_would_see_alone(tmp_path: Path) -> None:
    source = """
import os, sys, threading
print([os.path.basename(p) for p in sys.path[:1]], sys.argv, __file__ == os.path.abspath(sys.argv[0]))
print(sorted(k for k in globals() if k.startswith("__")), threading.current_thread().name)
print(sys.modules["__main__"].__dict__ is globals(), __spec__, __package__, os.getcwd())
"""  # noqa: E501
    script = tmp_path / "loop.py"
    audited = Ended(tmp_path, source).out
    plain = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, check=True, cwd=tmp_path
    ).stdout
    assert audited.startswith(plain)


def test_a_module_is_run_from_where_one_stands(tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").touch()
    (tmp_path / "package" / "train.py").write_text(LOOP + "train(int(sys.argv[1]))")
    done = subprocess.run(
        [*COMMAND, "-m", "package.train", "7"],
        capture_output=True, text=True, timeout=120, cwd=tmp_path,
    )  # fmt: skip
    assert "7 updates seen" in done.stdout
    assert done.returncode == 1


def test_a_termination_from_outside_reaches_the_script(tmp_path: Path) -> None:
    script = tmp_path / "loop.py"
    script.write_text(LOOP + "train(20); print('ready', flush=True); threading.Event().wait(60)")
    answer = tmp_path / "answer.json"
    process = subprocess.Popen(
        [*COMMAND, "--json", str(answer), str(script)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    begin = time.monotonic()
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM
    assert time.monotonic() - begin < 50
    facts = json.loads(answer.read_text())
    assert facts["outcome"] == "killed"
    assert [finding["slug"] for finding in facts["findings"]] == ["clip-after-step"]


def test_a_handler_of_the_script_is_left_to_it(tmp_path: Path) -> None:
    source = "signal.signal(signal.SIGTERM, lambda *a: sys.exit(9)); train()\n"
    ended = Ended(tmp_path, LOOP + source + "os.kill(os.getpid(), signal.SIGTERM); train()")
    assert (ended.code, ended.facts["outcome"]) == (9, "crashed")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="spawning is the only way there")
def test_a_spawning_script_without_a_guard_fails_as_it_would_alone(tmp_path: Path) -> None:
    source = "import torch.multiprocessing as mp\nprint('body')\nmp.spawn(print, nprocs=1)"
    ended = Ended(tmp_path, LOOP + source)
    assert (ended.code, ended.facts["outcome"]) == (1, "crashed")
    assert "bootstrapping phase" in ended.err
