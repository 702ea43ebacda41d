"""What is imported is declared, and what is declared is imported."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]

MODULES = {
    "accelerate": {"accelerate"},
    "hypothesis": {"hypothesis"},
    "numpy": {"numpy"},
    "nvidia-ml-py": {"pynvml"},
    "pillow": {"PIL"},
    "psutil": {"psutil"},
    "pydantic": {"pydantic", "pydantic_core"},
    "pytest": {"pytest"},
    "pytorch-lightning": {"pytorch_lightning"},
    "pyyaml": {"yaml"},
    "rich": {"rich"},
    "safetensors": {"safetensors"},
    "scikit-learn": {"sklearn"},
    "scipy": {"scipy"},
    "tensorboard": {"tensorboard"},
    "tokenizers": {"tokenizers"},
    "torch": {"torch"},
    "transformers": {"transformers"},
    "typer": {"typer"},
    "xxhash": {"xxhash"},
}
"""Distribution to the modules that it brings."""
TOOLS = {
    *("coverage", "mypy", "pytest-timeout", "pytest-xdist", "ruff", "types-psutil", "types-pyyaml"),
    *("setuptools", "zensical"),
}
"""Run, not imported."""
FOR_DEVELOPERS = ("docs", "lint", "test")


@cache
def imported(folder: Path) -> set[str]:
    """Modules from outside the standard library and this project that its files import."""
    files = [path for path in folder.rglob("*.py") if path.name != "conftest.py"]
    own = {"surefoot", *(path.name for path in (ROOT / "tests").iterdir())}
    own |= {path.stem for path in (ROOT / "tests").glob("*.py")}
    own |= {path.name for path in (ROOT / "tests/outside_package").iterdir()}
    return {name for path in files for name in _imported_by(path)} - sys.stdlib_module_names - own


def _imported_by(path: Path) -> Iterable[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            yield node.module.partition(".")[0]


def names(requirements: Iterable[str]) -> set[str]:
    return {re.split(r"[<>=!~\[; ]", text, maxsplit=1)[0].lower() for text in requirements}


def brought(distributions: Iterable[str]) -> set[str]:
    return {module for name in distributions for module in MODULES[name]}


EXTRAS = {extra: names(found) for extra, found in PROJECT["optional-dependencies"].items()}
ALWAYS = names(PROJECT["dependencies"])
FOR_USERS = ALWAYS.union(*(EXTRAS[extra] for extra in EXTRAS if extra not in FOR_DEVELOPERS))
DECLARED = FOR_USERS.union(*EXTRAS.values())


def test_every_distribution_is_known() -> None:
    assert (set(MODULES) | TOOLS) == DECLARED
    assert not set(MODULES) & TOOLS


def test_what_the_library_imports_is_declared_for_its_users() -> None:
    # The plugin of pytest is loaded by pytest.
    assert imported(ROOT / "src") - brought(FOR_USERS) == {"pytest"}


@pytest.mark.parametrize("distribution", sorted(FOR_USERS))
def test_what_is_declared_for_users_is_imported_by_the_library(distribution: str) -> None:
    assert MODULES[distribution] & imported(ROOT / "src")


def test_what_tests_and_benchmarks_import_is_declared() -> None:
    found = imported(ROOT / "tests") | imported(ROOT / "benchmarks")
    assert found <= brought(DECLARED - TOOLS)


@pytest.mark.parametrize("distribution", sorted(EXTRAS["test"] - TOOLS))
def test_what_is_declared_for_tests_is_imported_by_them(distribution: str) -> None:
    assert MODULES[distribution] & imported(ROOT / "tests")


def test_what_is_imported_is_seen(tmp_path: Path) -> None:
    text = "import os, a.b\nfrom c.d import e\nfrom . import f\ndef g():\n    import h\n"
    (tmp_path / "x.py").write_text(text, encoding="utf-8")
    assert imported(tmp_path) == {"a", "c", "h"}
