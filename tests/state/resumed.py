"""Resumes a run folder, alone or as one of several ranks, and says what came of it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from surefoot.assembly.material import prepare_material
from surefoot.assembly.process import prepare_process
from surefoot.assembly.run_parts import assemble
from surefoot.build import run_recipe
from surefoot.config.load import load_recipe
from surefoot.observe.metrics_log import read_rows
from surefoot.observe.metrics_schema import deterministic
from surefoot.state.checkpoint import list_checkpoints, read_checkpoint
from surefoot.verify.state_hash import checkpoint_hash, state_hash


@dataclass(frozen=True)
class Ended:
    """What a run has left behind, as far as two equal runs leave the same."""

    rows: list[dict[str, Any]]
    states: dict[str, str]
    """Hash of the state of each checkpoint, by name."""

    @property
    def steps(self) -> list[int]:
        """Of the updates that were applied."""
        return [row["step"] for row in self.rows if row["row"] == "step" and row["applied"]]


def config_of(checkpoint: Path) -> str:
    return str(checkpoint.parent.parent / "config.yaml")


def resumed(
    checkpoint: Path, overrides: tuple[str, ...] = (), accept: tuple[str, ...] = ()
) -> Ended:
    """Goes on from a checkpoint to the end of its run, whose data lies beside it."""
    folder = checkpoint.parent.parent
    os.chdir(folder.parent)
    resolved = load_recipe(config_of(checkpoint), ["log.console=off", *overrides])
    run_recipe(resolved, resume=checkpoint, accept_changes=accept)
    return Ended(
        [deterministic(row) for row in read_rows(folder / "metrics.jsonl")],
        {path.name: checkpoint_hash(path) for path in list_checkpoints(folder / "checkpoints")},
    )


def hash_of_restored(checkpoint: Path) -> str:
    """Hash of the state of the living parts that a checkpoint was put back into."""
    os.chdir(checkpoint.parent.parent.parent)
    recipe = load_recipe(config_of(checkpoint), ["log.console=off"]).recipe
    process = prepare_process(recipe.settings)
    material = prepare_material(recipe, resuming=True).material
    assembly = assemble(material, recipe.settings, process)
    try:
        state = assembly.trainable.state
        state.restore(read_checkpoint(checkpoint)[1])
        return state_hash(state.capture())
    finally:
        assembly.close()
