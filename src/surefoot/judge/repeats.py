"""Runs that repeat each other: the same configuration, data and kind, and another seed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from surefoot.config.load import differences
from surefoot.config.yaml_text import read_yaml
from surefoot.core.errors import SurefootError
from surefoot.observe.readers.run_data import RunData
from surefoot.observe.readers.runs import RunStatus, summarise_run
from surefoot.observe.run_folder import CONFIG_NAME

FREE = ("seed", "name", "log.", "loader.", "checkpoint.", "contract.", "guard.deadline")
"""Keys in which repeats may differ: they do not define another experiment."""


def is_repeat(first: Mapping[str, Any], second: Mapping[str, Any]) -> bool:
    """Whether two configurations are the same experiment."""
    return all(change.path.startswith(FREE) for change in differences(first, second))


def repeats_beside(run: RunData) -> set[int]:
    """Seeds of the finished runs in the same folder that repeat this one, including its own."""
    seeds: set[int] = set()
    for folder in sorted(run.path.parent.iterdir()):
        config = folder / CONFIG_NAME
        if not config.is_file():
            continue
        try:
            other = read_yaml(config.read_text("utf-8"), config.name)[0]
            if is_repeat(run.config, other) and summarise_run(folder).status is RunStatus.FINISHED:
                seeds.add(int(other["seed"]))
        except (SurefootError, OSError, ValueError, KeyError, TypeError):
            continue
    return seeds
