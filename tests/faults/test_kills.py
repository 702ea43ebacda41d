"""SIGKILL at random moments of a training: what is resumed is the run that was not killed."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from faults.trials import RECIPES, write_recipe
from surefoot.config.load import load_recipe
from surefoot.run.resume_rules import Tier
from surefoot.verify.resume_proof import OVERRIDES, prove_resume


@pytest.mark.faults_full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", list(RECIPES))
def test_killed_at_random_and_resumed_is_the_uninterrupted_run(
    name: str,
    tmp_path: Path,
    num_trials: Callable[[int, int], int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    kills = num_trials(6, 68)
    updates = max(12, kills + 12)
    recipe = write_recipe(tmp_path, name)
    overrides = [*OVERRIDES, "evaluate.every=5 steps", f"train.horizon={updates} steps"]
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    folder = tmp_path / "proof"
    folder.mkdir()
    proof = prove_resume(
        load_recipe(recipe, overrides), folder, updates=updates, kills=kills, seed=seed
    )
    assert proof.tier is Tier.T0, f"seed {seed}: {proof.difference}"
    assert len(proof.kills) >= 0.8 * kills, "some may come too late"
    print(f"{name}: {len(proof.kills)} kills, {proof.compared} states equal")
