"""Findings for other programs: SARIF 2.1 for code scanning, JUnit XML for test reports."""

from __future__ import annotations

import importlib.metadata
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from urllib.parse import quote
from xml.etree import ElementTree

from surefoot.core.finding import Certainty, Finding, Severity
from surefoot.sanitizer.output import fingerprint
from surefoot.sanitizer.rules import registry

SARIF_SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
_PRECISION = {
    Certainty.PROOF: "very-high",
    Certainty.STRONG: "high",
    Certainty.HEURISTIC: "medium",
    Certainty.CONVENTION: "low",
}
_SARIF_LEVELS = {Severity.ERROR: "error", Severity.WARNING: "warning", Severity.HINT: "note"}


def as_sarif(findings: Iterable[Finding]) -> str:
    """SARIF 2.1.0, as code scanning reads it; files below the working directory are relative."""
    entries = registry().entries
    index = {code: number for number, code in enumerate(entries)}
    rules = [
        {
            "id": info.code,
            "name": info.slug,
            "shortDescription": {"text": info.title},
            "fullDescription": {"text": info.why},
            "help": {"text": info.fix},
            "properties": {"precision": _PRECISION[info.certainty], "tags": [entry.family]},
            "defaultConfiguration": {"level": _SARIF_LEVELS[info.severity]},
        }
        for entry in entries.values()
        for info in [entry.info]
    ]
    driver = {
        "name": "surefoot audit",
        "semanticVersion": importlib.metadata.version("surefoot"),
        "rules": rules,
    }
    results = [_sarif_result(finding, index[finding.code]) for finding in findings]
    document = {
        "$schema": SARIF_SCHEMA,
        "version": "2.1.0",
        "runs": [{"tool": {"driver": driver}, "results": results}],
    }
    return json.dumps(document, indent=1, default=str) + "\n"


def _sarif_result(finding: Finding, rule: int) -> dict[str, object]:
    result: dict[str, object] = {
        "ruleId": finding.code,
        "ruleIndex": rule,
        "level": _SARIF_LEVELS[finding.severity],
        "message": {"text": f"{finding.message} Fix: {finding.fix}"},
        "partialFingerprints": {"surefootLine/v1": fingerprint(finding)},
        "properties": {"certainty": finding.certainty.value, "evidence": dict(finding.evidence)},
    }
    if finding.file:
        place = {
            "artifactLocation": {"uri": _uri(finding.file)},
            "region": {"startLine": max(finding.line, 1)},
        }
        result["locations"] = [{"physicalLocation": place}]
    return result


def _uri(file: str) -> str:
    path = Path(file).absolute()
    if path.is_relative_to(Path.cwd()):
        return quote(path.relative_to(Path.cwd()).as_posix())
    return path.as_uri()


def as_junit(findings: Sequence[Finding]) -> str:
    """JUnit XML: one test case per rule; it fails where the rule found more than a hint."""
    by_code: dict[str, list[Finding]] = {}
    for finding in findings:
        by_code.setdefault(finding.code, []).append(finding)
    suites = ElementTree.Element("testsuites")
    suite = ElementTree.SubElement(suites, "testsuite", name="surefoot audit")
    failures = 0
    entries = registry().entries
    for code, entry in entries.items():
        case = ElementTree.SubElement(
            suite, "testcase", classname=f"surefoot.{entry.family}", name=entry.info.slug
        )
        found = [f for f in by_code.get(code, ()) if f.severity is not Severity.HINT]
        if found:
            # A test case has one failure, whatever the number of places.
            failures += 1
            message = "; ".join(f.message for f in found)
            failure = ElementTree.SubElement(case, "failure", message=message)
            failure.text = "\n".join(f"{f.file}:{f.line}\n{f.fix}" for f in found)
    suite.set("tests", str(len(entries)))
    suite.set("failures", str(failures))
    suite.set("errors", "0")
    return ElementTree.tostring(suites, encoding="unicode", xml_declaration=True) + "\n"
