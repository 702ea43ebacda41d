"""Findings for other programs: SARIF 2.1 for code scanning, JUnit XML for test reports."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from xml.etree import ElementTree

from surefoot.core.finding import Finding, Severity
from surefoot.sanitizer.output import fingerprint
from surefoot.sanitizer.rules import all_rules

SARIF_SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
_SARIF_LEVELS = {Severity.ERROR: "error", Severity.WARNING: "warning", Severity.HINT: "note"}


def as_sarif(findings: Iterable[Finding]) -> str:
    """SARIF 2.1.0, as code scanning reads it."""
    rules = [
        {
            "id": info.code,
            "name": info.slug,
            "shortDescription": {"text": info.title},
            "fullDescription": {"text": info.why},
            "help": {"text": info.fix},
            "properties": {"precision": info.certainty.value, "tags": [info.family]},
            "defaultConfiguration": {"level": _SARIF_LEVELS[info.severity]},
        }
        for info in (rule.info for rule in all_rules())
    ]
    results = []
    for finding in findings:
        result: dict[str, object] = {
            "ruleId": finding.code,
            "level": _SARIF_LEVELS[finding.severity],
            "message": {"text": f"{finding.message} Fix: {finding.fix}"},
            "partialFingerprints": {"surefootLine/v1": fingerprint(finding)},
        }
        if finding.file:
            place = os.path.relpath(finding.file).replace(os.sep, "/")
            result["locations"] = [
                {
                    "physicalLocation": {
                        "artifactLocation": {"uri": place},
                        "region": {"startLine": max(finding.line, 1)},
                    }
                }
            ]
        results.append(result)
    driver = {"name": "surefoot audit", "rules": rules}
    document = {
        "$schema": SARIF_SCHEMA,
        "version": "2.1.0",
        "runs": [{"tool": {"driver": driver}, "results": results}],
    }
    return json.dumps(document, indent=1, default=str) + "\n"


def as_junit(findings: Sequence[Finding]) -> str:
    """JUnit XML: one test case per rule; it fails where the rule found more than a hint."""
    by_code: dict[str, list[Finding]] = {}
    for finding in findings:
        by_code.setdefault(finding.code, []).append(finding)
    suite = ElementTree.Element("testsuite", name="surefoot audit")
    failures = 0
    for rule in all_rules():
        case = ElementTree.SubElement(
            suite, "testcase", classname=f"surefoot.{rule.info.family}", name=rule.info.slug
        )
        for finding in by_code.get(rule.info.code, ()):
            if finding.severity is Severity.HINT:
                continue
            failures += 1
            place = f"{finding.file}:{finding.line}"
            failure = ElementTree.SubElement(case, "failure", message=finding.message)
            failure.text = f"{place}\n{finding.fix}"
    suite.set("tests", str(len(all_rules())))
    suite.set("failures", str(failures))
    return ElementTree.tostring(suite, encoding="unicode", xml_declaration=True) + "\n"
