"""The clean scripts stay quiet, and a fixed part of the mutants is found.

`score.py` runs them all.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from sanitizer_zoo.mutants import catalogue
from sanitizer_zoo.mutants.runner import Runner
from sanitizer_zoo.mutants.score import NEEDED, found
from surefoot.core.finding import Severity

EVERY = 40
"""One of so many mutants, sorted by kind, is tried here."""
CLEAN = [script for script in catalogue.scripts() if catalogue.ranks_of(script.name) == 1]


@pytest.fixture(scope="module")
def runner() -> Iterator[Runner]:
    with Runner() as started:
        yield started


def test_the_set_is_the_one_that_was_fixed() -> None:
    mutants = catalogue.mutants()
    assert len({mutant.name for mutant in mutants}) == len(mutants) >= 150
    assert set(catalogue.NO_BUG).isdisjoint(mutant.name for mutant in mutants)


def test_each_reason_is_about_a_mutation_that_is_made() -> None:
    assert set(catalogue.NO_BUG) <= {mutant.name for mutant in catalogue.every_mutation()}


@pytest.mark.parametrize("script", CLEAN, ids=lambda script: script.name)
def test_a_clean_script_is_quiet(runner: Runner, script: catalogue.Script) -> None:
    audited = runner.audit(script.name, script.text, num_ranks=1)
    assert (audited.code, audited.internal_errors) == (0, [])
    above = [f for f in audited.findings if f.severity is not Severity.HINT]
    assert [(f.slug, f.message) for f in above] == []


def test_a_part_of_the_mutants_is_found(runner: Runner) -> None:
    mutants = sorted(catalogue.mutants(), key=lambda mutant: mutant.kinds[0])
    part = [m for m in mutants if catalogue.ranks_of(m.script) == 1][::EVERY]
    missed = [m.name for m in part if not found(m, runner.audit(m.script, m.text, 1))]
    assert len(missed) <= (1 - NEEDED) * len(part), missed
