"""Findings: their JSON is what every `--json` output promises."""

from __future__ import annotations

import json
from dataclasses import FrozenInstanceError

import pytest

from surefoot.core.finding import Certainty, Finding, Severity


def test_the_words_are_the_promised_ones() -> None:
    assert [severity.value for severity in Severity] == ["error", "warning", "hint"]
    assert [c.value for c in Certainty] == ["proof", "strong", "heuristic", "convention"]


def test_as_json() -> None:
    finding = Finding(
        "CFG009",
        "dim-not-multiple-of-8",
        Severity.HINT,
        Certainty.CONVENTION,
        "33 is odd",
        file="a.yaml",
        line=3,
        evidence={"dim": 33},
        fix="use 40",
    )
    assert json.loads(json.dumps(finding.as_json())) == {
        "code": "CFG009",
        "slug": "dim-not-multiple-of-8",
        "severity": "hint",
        "certainty": "convention",
        "message": "33 is odd",
        "file": "a.yaml",
        "line": 3,
        "evidence": {"dim": 33},
        "fix": "use 40",
    }
    with pytest.raises(FrozenInstanceError):
        finding.line = 4  # type: ignore[misc]
