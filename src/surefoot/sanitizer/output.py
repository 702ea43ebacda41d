"""Findings for people: source excerpts, and baselines. Judges nothing and colours nothing."""

from __future__ import annotations

import hashlib
import json
import linecache
import os
from collections.abc import Sequence
from pathlib import Path

from surefoot.core.finding import Finding

EXCERPT_LINES = 2


def excerpt(finding: Finding, around: int = EXCERPT_LINES) -> list[tuple[int, str, bool]]:
    """Lines of source near a finding: number, text, and whether it is the line itself."""
    if not finding.file or not finding.line:
        return []
    linecache.checkcache(finding.file)
    first = max(finding.line - around, 1)
    numbered = [
        (number, linecache.getline(finding.file, number).rstrip("\n"))
        for number in range(first, finding.line + around + 1)
    ]
    return [(number, line, number == finding.line) for number, line in numbered if line]


def fingerprint(finding: Finding) -> str:
    """Stays the same when lines move: code, file name and the text of the line."""
    linecache.checkcache(finding.file)
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
