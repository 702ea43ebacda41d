"""What the audit offers besides the command: a context manager, a pytest fixture, pages, files."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from torch import nn

import surefoot
from surefoot.core.errors import RequestError
from surefoot.core.finding import Certainty, Finding, Severity
from surefoot.sanitizer import formats, output
from surefoot.sanitizer.pages import all_pages
from surefoot.sanitizer.rules import all_rules

ROOT = Path(__file__).parents[2]


def train(updates: int = 8, clear: bool = False) -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(updates):
        if clear:
            optimizer.zero_grad()
        model(torch.randn(4, 3)).square().mean().backward()
        optimizer.step()


# -- the context manager -------------------------------------------------------------------------


def test_with_audit_finds_what_runs_inside() -> None:
    with surefoot.audit() as audit:
        train()
    assert [finding.slug for finding in audit.findings] == ["missing-zero-grad"]
    with surefoot.audit() as audit:
        train(clear=True)
    assert audit.findings == []


def test_steps_ends_the_block() -> None:
    with surefoot.audit(steps=5) as audit:
        train(10**9)
        raise AssertionError("the block goes on")
    assert (audit.trace.updates, audit.outcome) == (5, "stopped")


def test_an_error_of_the_block_is_passed_on() -> None:
    with pytest.raises(ZeroDivisionError), surefoot.audit() as audit:
        train()
        raise ZeroDivisionError
    assert [finding.slug for finding in audit.findings] == ["missing-zero-grad"]


@pytest.mark.parametrize("options", [{"level": "medium"}, {"steps": 0}])
def test_a_wrong_request_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(RequestError):
        surefoot.audit(**options)


def test_deep_reads_more_than_light() -> None:
    assert surefoot.audit(level="deep").trace.deep
    assert not surefoot.audit().trace.deep


# -- the fixture ---------------------------------------------------------------------------------

TEST_FILE = """
import sys
import pytest

def train(clear=True, late=False):
    import torch
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(8):
        if clear:
            optimizer.zero_grad()
        model(torch.randn(4, 3)).square().mean().backward()
        optimizer.step()
        if late:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)

def test_no_torch_yet():
    assert "torch" not in sys.modules

def test_sound(surefoot_audit):
    train()
    surefoot_audit.end()
    assert surefoot_audit.findings == []

def test_unsound(surefoot_audit):
    train(late=True)

def test_doubtful(surefoot_audit):
    train(clear=False)

@pytest.mark.surefoot_audit(level="deep", steps=3)
def test_marked(surefoot_audit):
    assert (surefoot_audit.trace.deep, surefoot_audit.trace.max_updates) == (True, 3)
"""


def test_the_fixture_fails_a_test_with_a_proof_and_no_other(tmp_path: Path) -> None:
    (tmp_path / "test_loop.py").write_text(TEST_FILE)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "error"],
        capture_output=True, text=True, timeout=120, cwd=tmp_path,
    )  # fmt: skip
    assert "5 passed, 1 error" in done.stdout, done.stdout
    assert "ERROR test_loop.py::test_unsound" in done.stdout
    assert "error SF101 clip-after-step (proof)" in done.stdout
    line = TEST_FILE[: TEST_FILE.index("torch.nn.utils")].count("\n") + 1
    assert f"test_loop.py:{line}: " in done.stdout


# -- pages ---------------------------------------------------------------------------------------


def test_the_pages_of_the_rules_are_current() -> None:
    folder = ROOT / "docs" / "rules"
    written = {file.name: file.read_text(encoding="utf-8") for file in folder.iterdir()}
    stale = [name for name, text in all_pages().items() if written.get(name) != text]
    assert stale == [], "run: python -m surefoot.sanitizer.pages docs/rules"
    assert set(written) == {"index.md", *(f"{rule.info.code}.md" for rule in all_rules())}


def test_every_page_is_in_the_navigation() -> None:
    navigation = (ROOT / "zensical.toml").read_text(encoding="utf-8")
    assert [name for name in all_pages() if f'"rules/{name}"' not in navigation] == []


# -- files for other programs --------------------------------------------------------------------


def finding(severity: Severity, code: str = "SF101", line: int = 3, file: str = "") -> Finding:
    return Finding(
        code=code,
        slug="clip-after-step",
        severity=severity,
        certainty=Certainty.PROOF,
        message="a <message> & more",
        file=file,
        line=line if file else 0,
        evidence={"updates": 3, "shape": (1, 2), "place": Path("x")},
        fix="move it",
    )


def test_sarif_has_the_shape_that_version_2_1_asks_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    inside, outside = tmp_path / "a b" / "train.py", tmp_path.parent / "elsewhere.py"
    found = [
        finding(Severity.ERROR, file=str(inside)),
        finding(Severity.WARNING, code="SF102", file=str(outside)),
        finding(Severity.HINT, code="SF103"),
    ]
    document = json.loads(formats.as_sarif(found))
    assert set(document) == {"$schema", "version", "runs"}
    assert document["version"] == "2.1.0"
    (run,) = document["runs"]
    driver = run["tool"]["driver"]
    ids = [rule["id"] for rule in driver["rules"]]
    assert ids == [rule.info.code for rule in all_rules()]
    assert driver["name"]
    assert driver["semanticVersion"] == surefoot.__version__
    for rule in driver["rules"]:
        assert {"text"} == set(rule["shortDescription"]) == set(rule["help"])
        assert rule["defaultConfiguration"]["level"] in ("error", "warning", "note")
    levels = [result["level"] for result in run["results"]]
    assert levels == ["error", "warning", "note"]
    for result in run["results"]:
        assert ids[result["ruleIndex"]] == result["ruleId"]
        assert all(isinstance(v, str) for v in result["partialFingerprints"].values())
    places = [
        location["physicalLocation"]
        for result in run["results"]
        for location in result.get("locations", [])
    ]
    assert [p["artifactLocation"]["uri"] for p in places] == ["a%20b/train.py", outside.as_uri()]
    assert all(place["region"]["startLine"] >= 1 for place in places)


def test_junit_has_a_case_per_rule_and_a_failure_per_finding() -> None:
    found = [finding(Severity.ERROR, file="train.py"), finding(Severity.HINT, code="SF103")]
    suites = ElementTree.fromstring(formats.as_junit(found))
    (suite,) = suites.iter("testsuite")
    cases = suite.findall("testcase")
    assert (len(cases), suite.get("tests")) == (len(all_rules()), str(len(all_rules())))
    failures = suite.findall("testcase/failure")
    assert (len(failures), suite.get("failures"), suite.get("errors")) == (1, "1", "0")
    assert failures[0].get("message") == "a <message> & more"
    assert "train.py:3" in (failures[0].text or "")


def test_excerpts_show_the_line_and_its_neighbours(tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text("one\ntwo\nthree\nfour\n")
    shown = output.excerpt(finding(Severity.ERROR, line=2, file=str(file)), around=1)
    assert shown == [(1, "one", False), (2, "two", True), (3, "three", False)]


# -- the command ---------------------------------------------------------------------------------

LOOP = """
import torch
print("of the script")
model = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(8):
    optimizer.zero_grad()
    model(torch.randn(4, 3)).square().mean().backward()
    optimizer.step()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
"""


def command(*words: object, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "surefoot", "audit", *map(str, words)],
        capture_output=True, text=True, timeout=120, cwd=folder,
    )  # fmt: skip


def test_the_text_has_line_evidence_and_fix(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(LOOP)
    shown = command("train.py", folder=tmp_path)
    assert shown.returncode == 1
    for part in (
        f"error SF101 clip-after-step (proof)\n  {tmp_path}/train.py:10",
        ">   10 |     torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)",
        "fix: ",
        "surefoot show rules SF101",
    ):
        assert part in shown.stdout


def test_a_known_finding_does_not_fail_the_command(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(LOOP)
    first = command("--baseline", "known.json", "train.py", folder=tmp_path)
    assert (first.returncode, (tmp_path / "known.json").exists()) == (0, True)
    (tmp_path / "train.py").write_text("# one line more\n" + LOOP)
    again = command("--baseline", "known.json", "train.py", folder=tmp_path)
    assert (again.returncode, "1 known from the baseline" in again.stdout) == (0, True)
    (tmp_path / "train.py").write_text(LOOP.replace("(), 0.1)", "(), 0.2)"))
    new = command("--baseline", "known.json", "train.py", folder=tmp_path)
    assert new.returncode == 1


def test_json_goes_to_standard_output_on_request(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(LOOP)
    shown = command("--json", "-", "--steps", "5", "train.py", folder=tmp_path)
    facts = json.loads(shown.stdout)
    assert (facts["updates"], facts["outcome"]) == (5, "stopped")
    assert "SF101" in shown.stderr
    assert "of the script" in shown.stderr


def test_an_unknown_level_or_script_is_a_wrong_request(tmp_path: Path) -> None:
    assert command("--level", "medium", "train.py", folder=tmp_path).returncode == 2
    assert command("train.py", folder=tmp_path).returncode == 2
