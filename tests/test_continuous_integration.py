"""The matrix is what is declared, and the hooks are what `make lint` runs."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[1]
WORKFLOW = (ROOT / ".github/workflows/ci.yml").read_text(encoding="utf-8")
JOBS: dict[str, Any] = yaml.safe_load(WORKFLOW)["jobs"]
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PROJECT = SETTINGS["project"]
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")


def commands(job: str) -> list[str]:
    return [step["run"] for step in JOBS[job]["steps"] if "run" in step]


def test_each_python_that_is_declared_is_tried() -> None:
    declared = re.findall(r"Python :: (3\.\d+)", " ".join(PROJECT["classifiers"]))
    assert JOBS["test"]["strategy"]["matrix"]["python"] == declared
    assert PROJECT["requires-python"] == f">={declared[0]}"


def test_each_torch_that_is_declared_is_tried() -> None:
    (torch,) = (name for name in PROJECT["dependencies"] if name.startswith("torch>"))
    first, end = (int(minor) for minor in re.findall(r"2\.(\d+)", torch))
    tried = JOBS["test"]["strategy"]["matrix"]["torch"]
    assert tried == [f"2.{minor}" for minor in range(first, end)]


def test_what_runs_is_a_target_of_make() -> None:
    assert commands("lint") == ["make lint"]
    assert commands("test") == ['make test TORCH="torch==${{ matrix.torch }}.*"']
    for target in ("lint", "test"):
        assert re.search(rf"^{target}:", MAKEFILE, re.MULTILINE)


def test_no_host_is_named() -> None:
    assert "://" not in WORKFLOW


def test_the_hooks_are_those_of_make_lint() -> None:
    text = (ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8")
    (local,) = yaml.safe_load(text)["repos"]
    assert local["repo"] == "local"
    hooks = {hook["entry"].removeprefix(".venv/bin/") for hook in local["hooks"]}
    assert hooks == {"ruff check --fix", "ruff format", "mypy"}
    recipe = MAKEFILE.partition("\nlint:")[2].partition("\n\n")[0]
    assert [line.split("/", 1)[1] for line in recipe.splitlines()[1:]] == [
        "ruff check .",
        "ruff format --check .",
        "mypy",
    ]


def test_types_are_strict_in_every_module() -> None:
    mypy = SETTINGS["tool"]["mypy"]
    assert mypy["strict"] is True
    assert mypy["files"] == ["src/surefoot"]
    # What stands here is said of other packages alone.
    named = [name for override in mypy["overrides"] for name in override["module"]]
    assert [name for name in named if name.partition(".")[0] in ("surefoot", "*")] == []
