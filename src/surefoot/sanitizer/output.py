"""Findings for people and machines: source excerpts, SARIF 2.1, JUnit, baselines.

Judges nothing and colours nothing.
"""

from __future__ import annotations

import hashlib
import json
import linecache
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from xml.etree import ElementTree

from surefoot.core.finding import Finding, Severity
from surefoot.sanitizer.rules import all_rules

SARIF_SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
_SARIF_LEVELS = {Severity.ERROR: "error", Severity.WARNING: "warning", Severity.HINT: "note"}
EXCERPT_LINES = 2


def excerpt(finding: Finding, around: int = EXCERPT_LINES) -> list[tuple[int, str, bool]]:
    """Lines of source near a finding: number, text, and whether it is the line itself."""
    if not finding.file or not finding.line:
        return []
    first = max(finding.line - around, 1)
    numbered = [
        (number, linecache.getline(finding.file, number).rstrip("\n"))
        for number in range(first, finding.line + around + 1)
    ]
    return [(number, line, number == finding.line) for number, line in numbered if line]


def fingerprint(finding: Finding) -> str:
    """Stays the same when lines move: code, file name and the text of the line."""
    text = linecache.getline(finding.file, finding.line).strip() if finding.file else ""
    key = "\n".join((finding.code, os.path.basename(finding.file), text))
    return hashlib.blake2b(key.encode(), digest_size=12).hexdigest()


def without_baseline(
    findings: Sequence[Finding], baseline: Path | None
) -> tuple[list[Finding], int]:
    """The findings that the baseline does not know, and how many it knows.

    A baseline that does not exist yet is written from these findings.
    """
    if baseline is None:
        return list(findings), 0
    if not baseline.exists():
        rows = [{"code": f.code, "fingerprint": fingerprint(f)} for f in findings]
        baseline.write_text(json.dumps({"known": rows}, indent=1) + "\n", encoding="utf-8")
        return [], len(findings)
    known = {row["fingerprint"] for row in json.loads(baseline.read_text())["known"]}
    new = [f for f in findings if fingerprint(f) not in known]
    return new, len(findings) - len(new)


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
