"""Scores the audit on mutants of clean scripts; `make audit-mutants` runs it.

python tests/sanitizer_zoo/mutants/score.py            every mutant of `mutants.txt`
python tests/sanitizer_zoo/mutants/score.py --only X   those whose name contains X
python tests/sanitizer_zoo/mutants/score.py --write    fixes the set anew, scoring nothing
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter, defaultdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from sanitizer_zoo.mutants import catalogue
from sanitizer_zoo.mutants.mutant import Mutant
from sanitizer_zoo.mutants.runner import Audited, Runner
from surefoot.core.finding import Severity

NEEDED = 0.85


def found(mutant: Mutant, audited: Audited) -> bool:
    """Whether one of the mutant's kinds is reported; above a hint where the kind is no guess."""
    return any(
        finding.slug in mutant.kinds
        and (finding.severity is not Severity.HINT or finding.slug in catalogue.HINTS)
        for finding in audited.findings
    )


def write(runner: Runner) -> int:
    """Fixes the set by running every mutation once; what the audit says of it plays no part."""

    def run(name: str, text: str) -> tuple[int, str]:
        return runner.plain(name, text, catalogue.ranks_of(name))

    judged = catalogue.members(run)
    kept = [mutant for mutant, reason in judged if not reason]
    catalogue.LIST.write_text("".join(catalogue.entry(mutant) + "\n" for mutant in kept))
    for mutant, reason in judged:
        if reason:
            print(f"{mutant.name}: {reason}")
    print(f"{len(kept)} mutants; {Counter(reason for _, reason in judged if reason)}")
    return 0


def score(runner: Runner, only: str) -> int:
    """Prints the table, the misses and the false alarms; 0 where all is well."""
    alarms = 0
    chosen = [mutant for mutant in catalogue.mutants() if only in mutant.name]
    names = {mutant.script for mutant in chosen}
    for script in catalogue.scripts():
        if only and script.name not in names:
            continue
        num_ranks = catalogue.ranks_of(script.name)
        audited = runner.audit(script.name, script.text, num_ranks)
        if runner.plain(script.name, script.text, num_ranks)[1] != audited.outcome:
            print(f"{script.name}: the audit changed what was computed")
            alarms += 1
        for error in audited.internal_errors:
            print(f"{script.name}: the audit failed: {error}")
        for finding in audited.findings:
            above = finding.severity is not Severity.HINT
            alarms += above
            word = "FALSE ALARM" if above else "hint"
            print(f"{word} on clean {script.name}: {finding.slug}, {finding.message}")
    totals: Counter[str] = Counter()
    misses: dict[str, list[str]] = defaultdict(list)
    later = Later()
    for mutant in chosen:
        audited = runner.audit(mutant.script, mutant.text, catalogue.ranks_of(mutant.script))
        for error in audited.internal_errors:
            print(f"{mutant.name}: the audit failed: {error}")
        totals[mutant.kinds[0]] += 1
        is_found = found(mutant, audited)
        later.add(mutant, is_found)
        if not is_found:
            seen = ", ".join(sorted({f"{f.slug} ({f.severity.value})" for f in audited.findings}))
            misses[mutant.kinds[0]].append(f"{mutant.name}: {seen or 'nothing'}")
    print(later)
    return report(totals, misses, alarms)


class Later:
    """Recall on the scripts that were written after the rules had been improved."""

    def __init__(self) -> None:
        self.all = self.found = 0

    def add(self, mutant: Mutant, is_found: bool) -> None:
        """Counts a mutant if it is of such a script."""
        if catalogue.is_later(mutant.script):
            self.all += 1
            self.found += is_found

    def __str__(self) -> str:
        share = self.found / max(self.all, 1)
        return f"of the scripts written later: {self.found}/{self.all} = {share:.1%}"


def report(totals: Counter[str], misses: dict[str, list[str]], alarms: int) -> int:
    """Prints recall by kind and in all."""
    for kind in sorted(totals):
        print(f"{kind:28} {totals[kind] - len(misses[kind]):3}/{totals[kind]}")
        for miss in misses[kind]:
            print(f"    missed {miss}")
    total, missed = totals.total(), sum(map(len, misses.values()))
    recall = (total - missed) / total if total else 0.0
    shares = [1 - len(misses[kind]) / totals[kind] for kind in totals]
    print(f"recall {total - missed}/{total} = {recall:.1%} of {len(shares)} kinds", end="; ")
    print(f"mean of the kinds {sum(shares) / max(len(shares), 1):.1%}", end="; ")
    print(f"false alarms on clean scripts {alarms}")
    return 0 if recall >= NEEDED and alarms == 0 else 1


def main() -> int:
    """Entry of the command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="")
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    with Runner() as runner:
        return write(runner) if arguments.write else score(runner, arguments.only)


if __name__ == "__main__":
    sys.exit(main())
