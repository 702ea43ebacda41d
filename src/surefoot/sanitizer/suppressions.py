"""`# surefoot: ignore[SF101] reason`: the local way to say "on purpose"."""

from __future__ import annotations

import linecache
import re

from surefoot.core.finding import Finding

_COMMENT = re.compile(r"#\s*surefoot:\s*ignore\[([A-Za-z0-9,\s_-]+)\]")


def is_suppressed(finding: Finding) -> bool:
    """Whether the line of a finding, or a comment line right above it, names its code or slug."""
    if not finding.file or not finding.line:
        return False
    lines = [linecache.getline(finding.file, finding.line)]
    above = linecache.getline(finding.file, finding.line - 1) if finding.line > 1 else ""
    if above.lstrip().startswith("#"):
        lines.append(above)
    for line in lines:
        match = _COMMENT.search(line)
        names = {name.strip() for name in match[1].split(",")} if match else set()
        if names & {finding.code, finding.slug}:
            return True
    return False
