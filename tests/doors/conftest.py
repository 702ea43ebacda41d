"""Installs the package of `tests/outside_package` where this process and its children find it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from surefoot.diagnosis.causes import cause_registry
from surefoot.sanitizer.rules import registry

PACKAGE = Path(__file__).parents[1] / "outside_package"


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of installed packages that holds this one alone; nothing is fetched."""
    folder = tmp_path_factory.mktemp("site")
    # A build leaves traces beside the sources.
    sources = shutil.copytree(PACKAGE, tmp_path_factory.mktemp("outside") / "package")
    words = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-index"]
    words += ["--no-deps", "--no-build-isolation", "--target", str(folder), str(sources)]
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def forget_what_is_installed() -> None:
    """A process reads once which rules and causes there are."""
    registry.cache_clear()
    cause_registry.cache_clear()


@pytest.fixture
def installed(site: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The package is in the environment of the test, and of the processes that it starts."""
    forget_what_is_installed()
    monkeypatch.syspath_prepend(str(site))
    rest = os.environ.get("PYTHONPATH")
    monkeypatch.setenv("PYTHONPATH", str(site) if rest is None else f"{site}{os.pathsep}{rest}")
    yield site
    forget_what_is_installed()
