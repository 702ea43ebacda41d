"""Loops in other frameworks run under the audit: no crash, no false finding, bugs at their line."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
PACKAGES = {
    "accelerate": "accelerate",
    "lightning": "pytorch-lightning",
    "transformers": "transformers",
}
BUGS = {
    "accelerate": "clip-after-step",
    "lightning": "loss-broadcast",
    "transformers": "softmax-before-ce",
}

FRAMEWORKS = [
    "accelerate",
    *(pytest.param(n, marks=pytest.mark.slow) for n in ("lightning", "transformers")),
]


def audited(folder: Path, framework: str, *words: str, options: tuple[str, ...] = ()) -> Any:
    answer = folder / "answer.json"
    script = HERE / f"loops_{framework}.py"
    command = [sys.executable, "-m", "surefoot", "audit", "--level", "deep", "--json", str(answer)]
    done = subprocess.run(
        [*command, *options, str(script), *words],
        capture_output=True, text=True, timeout=240, cwd=folder,
    )  # fmt: skip
    facts = json.loads(answer.read_text())
    assert facts["outcome"] == "completed", done.stderr[-3000:]
    assert facts["exit_code_of_script"] == 0
    assert facts["internal_errors"] == []
    assert facts["updates"] > 8
    return facts


def test_the_frameworks_are_there() -> None:
    """They come with the `test` extra, so that nothing here is skipped."""
    assert [importlib.metadata.version(name) for name in PACKAGES.values()]


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_right_loop_has_no_finding(tmp_path: Path, framework: str) -> None:
    assert audited(tmp_path, framework, "own")["findings"] == []


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_planted_bug_is_found_at_its_line(tmp_path: Path, framework: str) -> None:
    script = HERE / f"loops_{framework}.py"
    lines = script.read_text().splitlines()
    (line,) = [number for number, text in enumerate(lines, 1) if "# the bug" in text]
    (finding,) = audited(tmp_path, framework, "bug")["findings"]
    assert (finding["slug"], finding["file"]) == (BUGS[framework], str(script))
    assert (finding["line"], finding["certainty"]) == (line, "proof")


@pytest.mark.slow
@pytest.mark.parametrize("framework", ["accelerate", "transformers"])
def test_two_ranks_have_no_finding(tmp_path: Path, framework: str) -> None:
    facts = audited(tmp_path, framework, options=("--nproc", "2"))
    assert (facts["processes"], facts["findings"]) == (2, [])


@pytest.mark.slow
@pytest.mark.parametrize(("word", "slugs"), [("right", []), ("bug", ["loss-broadcast"])])
def test_ranks_that_lightning_starts_itself_are_followed(
    tmp_path: Path, word: str, slugs: list[str]
) -> None:
    facts = audited(tmp_path, "lightning", "ddp", word)
    assert (facts["processes"], [f["slug"] for f in facts["findings"]]) == (2, slugs)
    assert [f["evidence"]["ranks"] for f in facts["findings"]] == [[0, 1] for _ in slugs]
