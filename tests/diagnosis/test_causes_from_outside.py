"""Causes of other packages: by an argument and by an entry point; their failures stay theirs."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from diagnosis.made_up import falling
from surefoot.core.errors import RequestError
from surefoot.core.finding import Certainty, Severity
from surefoot.diagnosis.causes import Cause, CauseInfo, Sign, SignText, all_causes, cause, sign
from surefoot.diagnosis.doctor import examine
from surefoot.diagnosis.log_features.log import LogFeatures
from surefoot.diagnosis.needs import LOSS, RATE, Need
from surefoot.diagnosis.recording import Recording, RecordingBuilder

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "doctor-cause.md"


def made(code: str, slug: str, *, raises: bool = False, needs: tuple[Need, ...] = (LOSS,)) -> Cause:
    signs = {"seen": SignText(0.4, "There are {num} losses. The rate is {rate:g}.")}
    words = ("family", Severity.HINT, Certainty.CONVENTION, "title", "observes", "why", "fix", "-")

    @cause(CauseInfo(code, slug, *words, signs), needs=needs)
    def look(log: LogFeatures) -> Sign | None:
        if raises:
            raise ValueError("of the cause")
        return sign("seen", num=len(log.loss), rate=None)

    return look


def recorded() -> Recording:
    builder = RecordingBuilder("log", "made up")
    for step, loss in enumerate(falling().tolist()):
        builder.add({"step": step, "loss": loss})
    return builder.build()


def test_a_cause_given_as_an_argument_is_asked_beside_the_others() -> None:
    found = examine(recorded(), causes=[made("ACME01", "mine")])
    (finding,) = found.findings
    assert (finding.code, finding.severity) == ("ACME01", Severity.HINT)
    # The sentence that names what is not known is left out.
    assert finding.message == "There are 400 losses."
    assert "warmup-too-long" in {slug for entry in found.undetermined for slug in entry.slugs}


def test_a_cause_that_raises_is_named_and_left_out() -> None:
    causes = [made("ACME01", "fails", raises=True), made("ACME02", "mine")]
    found = examine(recorded(), causes=causes)
    assert [finding.slug for finding in found.findings] == ["mine"]
    (left_out,) = found.left_out
    origin = __name__.partition(".")[0]
    assert str(left_out) == f"fails of {origin} is left out: ValueError: of the cause"


def test_a_cause_that_lacks_what_it_needs_is_not_asked() -> None:
    found = examine(recorded(), causes=[made("ACME01", "fails", raises=True, needs=(RATE,))])
    assert not found.left_out
    assert "fails" in {entry.missing: entry.slugs for entry in found.undetermined}["lr"]


@pytest.mark.parametrize(("code", "slug"), [("SFD101", "mine"), ("ACME01", "rate-too-high")])
def test_a_code_or_slug_of_another_is_refused(code: str, slug: str) -> None:
    with pytest.raises(RequestError, match="SFD101 rate-too-high"):
        examine(recorded(), causes=[made(code, slug)])
    assert len(all_causes()) == 28


def test_the_example_of_the_page_runs(tmp_path: Path) -> None:
    (tmp_path / "example.py").write_text(example())
    done = subprocess.run(
        [sys.executable, "example.py"], capture_output=True, text=True, timeout=120, cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


# -- an installed package --------------------------------------------------------------------------

ENTRIES = """[surefoot.causes]
acme = acme_causes
gone = acme_causes:Gone
number = acme_causes:NUMBER
taken = acme_causes.taken:taken
"""
TAKEN = """
import dataclasses
from acme_causes import rate_never_changes as other
info = dataclasses.replace(other.info, code="SFD101")
taken = dataclasses.replace(other, info=info)
"""


def example() -> str:
    found = re.search(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert found
    return found[1]


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A folder with an installed package that brings the cause of the page, and bad ones."""
    files = {
        "acme_causes/__init__.py": example().partition("\nbuilder = ")[0] + "\nNUMBER = 3\n",
        "acme_causes/taken.py": TAKEN,
        "acme_causes-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: acme\nVersion: 1.0\n",
        "acme_causes-1.0.dist-info/entry_points.txt": ENTRIES,
        "log.csv": "loss,lr\n" + "".join(f"{2 * 0.98**n + 0.2},0.01\n" for n in range(200)),
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def command(*words: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "surefoot", *words, "--json", "out.json"],
        capture_output=True, text=True, timeout=120, cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), *sys.path])},
    )  # fmt: skip


def test_an_installed_package_brings_causes(package: Path) -> None:
    done = command("doctor", "log.csv", folder=package)
    assert done.returncode == 0, done.stderr
    facts = json.loads((package / "out.json").read_text())
    assert [finding["code"] for finding in facts["findings"]] == ["ACME01"]
    assert [entry["name"] for entry in facts["left_out"]] == ["gone", "number", "taken"]
    assert "number of acme is left out: TypeError: 3 is no cause" in done.stdout
    assert "taken of acme is left out: RequestError: surefoot has a cause SFD101" in done.stdout


def test_installed_causes_are_listed_with_where_they_come_from(package: Path) -> None:
    done = command("show", "causes", folder=package)
    facts = json.loads((package / "out.json").read_text())
    origins = {found["code"]: found["origin"] for found in facts["causes"]}
    assert done.returncode == 0, done.stderr
    assert (origins["ACME01"], origins["SFD101"], len(origins)) == ("acme", "surefoot", 29)
    assert len(facts["left_out"]) == 3
    one = command("show", "causes", "rate-never-changes", folder=package)
    assert "learning rate; hint, convention; from acme" in one.stdout
