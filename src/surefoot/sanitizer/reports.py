"""Makes one list of what several processes found. Loads the rules only to compare ranks."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from surefoot.core.finding import Finding
from surefoot.sanitizer.summary import Summary, failure, ordered
from surefoot.sanitizer.suppressions import is_suppressed


def merged_reports(summaries: Sequence[Summary]) -> list[Finding]:
    """The findings of several processes as one list, with ranks named."""
    if len(summaries) < 2:
        return [finding for summary in summaries for finding in summary.findings]
    ranks: dict[tuple[str, str, int], set[int]] = {}
    first: dict[tuple[str, str, int], Finding] = {}
    for summary in summaries:
        for finding in summary.findings:
            key = (finding.code, finding.file, finding.line)
            ranks.setdefault(key, set()).add(summary.rank)
            first.setdefault(key, finding)
    found = [
        dataclasses.replace(f, evidence={**f.evidence, "ranks": sorted(ranks[key])})
        for key, f in first.items()
    ]
    return ordered(found + _across(summaries))


def _across(summaries: Sequence[Summary]) -> list[Finding]:
    # Rules import torch.
    from surefoot.sanitizer.rules import all_rules

    found: list[Finding] = []
    for rule in all_rules():
        facts = {s.rank: s.facts[rule.info.code] for s in summaries if rule.info.code in s.facts}
        if len(facts) > 1:
            try:
                found += [f for f in rule.across(facts) if not is_suppressed(f)]
            except Exception:
                summaries[0].internal_errors.append(failure(f"{rule.__name__}.across"))
    return found
