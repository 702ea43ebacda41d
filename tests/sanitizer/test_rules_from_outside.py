"""Rules of other packages: by an argument and by an entry point, with failures that stay theirs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import surefoot
from surefoot.core.errors import RequestError
from surefoot.sanitizer import events as ev
from surefoot.sanitizer.rules import Certainty, Findings, Rule, RuleInfo, registry
from surefoot.sanitizer.session import Audit

WORDS = {"title": "Steps are made.", "observes": "Steps.", "why": "They cost.", "fix": "Stop."}


class CountSteps(Rule):
    info = RuleInfo(code="ACME01", slug="steps", certainty=Certainty.CONVENTION, **WORDS)

    def setup(self) -> None:
        self.steps = 0

    def on_step_end(self, event: ev.StepEnd) -> None:
        self.steps += 1

    def findings(self) -> Findings:
        yield self.report(f"{self.steps} steps", steps=self.steps)


class FailsAtTheSecondStep(Rule):
    info = RuleInfo(code="ACME02", slug="fails", certainty=Certainty.PROOF, **WORDS)

    def setup(self) -> None:
        self.steps = 0

    def on_step_end(self, event: ev.StepEnd) -> None:
        self.steps += 1
        if self.steps == 2:
            raise ValueError("of the rule")

    def findings(self) -> Findings:
        yield self.report("half of what there was to see")


class TakesACode(Rule):
    info = RuleInfo(code="SF101", slug="taken", certainty=Certainty.PROOF, **WORDS)

    def findings(self) -> Findings:
        return ()


def train(updates: int = 5) -> None:
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(updates):
        optimizer.zero_grad()
        model(torch.randn(4, 3)).square().mean().backward()
        optimizer.step()


def test_a_rule_given_as_an_argument_is_used_beside_the_others() -> None:
    with surefoot.audit(rules=[CountSteps]) as audit:
        train()
    (finding,) = audit.findings
    assert (finding.code, finding.message, finding.evidence) == ("ACME01", "5 steps", {"steps": 5})
    assert len(audit.rules) == len(registry().entries) + 1


def test_a_rule_that_raises_is_named_and_left_out_and_the_loop_goes_on() -> None:
    with surefoot.audit(rules=[FailsAtTheSecondStep, CountSteps]) as audit:
        train()
    assert [finding.message for finding in audit.findings] == ["5 steps"]
    (error,) = audit.trace.internal_errors
    assert error.startswith("FailsAtTheSecondStep.on_step_end: ValueError: of the rule\n")


@pytest.mark.parametrize("wrong", [TakesACode, nn.Linear, CountSteps(Audit(rules=()).trace)])
def test_what_is_no_rule_or_has_the_code_of_another_is_refused(wrong: object) -> None:
    with pytest.raises(RequestError, match=r"no rule|SF101"):
        surefoot.audit(rules=[wrong])  # type: ignore[list-item]


def test_a_misspelt_handler_is_refused_where_the_class_is_made() -> None:
    with pytest.raises(TypeError, match="on_step_ends"):
        type("Misspelt", (CountSteps,), {"on_step_ends": lambda self, event: None})


# -- an installed package ------------------------------------------------------------------------

MODULE = """
from surefoot.sanitizer.rules import Certainty, Rule, RuleInfo

def info(code, slug):
    return RuleInfo(code, slug, Certainty.STRONG, "Forwards are counted.", "Forwards.", "-", "-")

class Forwards(Rule):
    info = info("ACME03", "forwards")
    def setup(self): self.count = 0
    def on_forward_end(self, event): self.count += 1
    def findings(self): yield self.report(f"{self.count} forwards", count=self.count)

class Raises(Rule):
    info = info("ACME04", "raises")
    def on_forward_end(self, event): raise KeyError("mine")
    def findings(self): return ()

class FailsToBegin(Rule):
    info = info("ACME05", "fails-to-begin")
    def setup(self): 1 / 0
    def findings(self): return ()

class Taken(Rule):
    info = info("SF101", "taken")
    def findings(self): return ()
"""
ENTRIES = """[surefoot.rules]
acme = acme_rules
gone = acme_rules:Gone
number = acme_rules.numbers:NUMBER
"""
SCRIPT = """
import torch
model = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(4):
    optimizer.zero_grad()
    model(torch.randn(4, 3)).square().mean().backward()
    optimizer.step()
print("to its end")
"""


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A folder with an installed package that brings good and bad rules."""
    files = {
        "acme_rules/__init__.py": '"""Rules of Acme."""\n' + MODULE,
        "acme_rules/numbers.py": "NUMBER = 3\n",
        "acme_rules-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: acme\nVersion: 1.0\n",
        "acme_rules-1.0.dist-info/entry_points.txt": ENTRIES,
        "train.py": SCRIPT,
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def command(*words: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "surefoot", *words],
        capture_output=True, text=True, timeout=120, cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), *sys.path])},
    )  # fmt: skip


def test_an_installed_package_brings_rules(package: Path) -> None:
    done = command("audit", "--json", "out.json", "train.py", folder=package)
    assert (done.returncode, "to its end" in done.stdout) == (0, True), done.stderr
    facts = json.loads((package / "out.json").read_text())
    assert [f["message"] for f in facts["findings"]] == ["4 forwards"]
    named = sorted(error.splitlines()[0] for error in facts["internal_errors"])
    assert [line.partition(":")[0] for line in named] == [
        "FailsToBegin",
        "Raises.on_forward_end",
        "Taken of acme is left out",
        "gone of acme is left out",
        "number of acme is left out",
    ]
    assert all(line in done.stdout for line in named)


def test_installed_rules_are_listed_with_where_they_come_from(package: Path) -> None:
    done = command("show", "rules", "--json", "out.json", folder=package)
    facts = json.loads((package / "out.json").read_text())
    origins = {rule["code"]: rule["origin"] for rule in facts["rules"]}
    assert (origins["SF101"], origins["ACME03"], origins["SFD101"]) == (
        "surefoot",
        "acme",
        "surefoot",
    )
    assert len(facts["left_out"]) == 3
    assert done.returncode == 0, done.stderr
    one = command("show", "rules", "ACME03", folder=package)
    assert "rules of Acme; warning, strong; from acme" in one.stdout
