"""Runs that repeat each other: the same configuration, data and kind, and another seed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from surefoot.config.load import differences
from surefoot.config.yaml_text import read_yaml
from surefoot.core.errors import SurefootError
from surefoot.observe.readers.run_data import RunData
from surefoot.observe.readers.runs import RunStatus, summarise_run
from surefoot.observe.run_folder import CONFIG_NAME, RECORD_NAME

FREE = ("seed", "name", "log.", "loader.", "checkpoint.", "contract.", "guard.deadline")
"""Keys in which repeats may differ: they do not define another experiment."""


def is_repeat(first: Mapping[str, Any], second: Mapping[str, Any]) -> bool:
    """Whether two configurations are the same experiment."""
    return all(change.path.startswith(FREE) for change in differences(first, second))


def identity_facts(extra: Mapping[str, Any]) -> dict[str, Any]:
    """What a run has recorded of its model, task and own code, flat; empty for an older record.

    The initial weights are left out: another seed draws others.
    """
    identity = extra.get("identity")
    if not isinstance(identity, Mapping):
        return {}
    found = {"begins from": identity["begins_from"]} if "begins_from" in identity else {}
    for part in ("model", "task"):
        inner = identity.get(part)
        if isinstance(inner, Mapping):
            found |= {f"{part}.{name}": value for name, value in inner.items()}
    return found


def same_identity(first: Mapping[str, Any], second: Mapping[str, Any]) -> bool:
    """Whether two runs have one model, task and own code, by `extra` of their records.

    A record of an older version does not say it; then configuration and data decide.
    """
    one, other = identity_facts(first), identity_facts(second)
    return not one or not other or one == other


def repeats_beside(run: RunData) -> set[int]:
    """Seeds of the finished runs in the same folder that repeat this one, including its own."""
    seeds: set[int] = set()
    for folder in sorted(run.path.parent.iterdir()):
        config = folder / CONFIG_NAME
        if not config.is_file():
            continue
        try:
            other = read_yaml(config.read_text("utf-8"), config.name)[0]
            if not (is_repeat(run.config, other) and same_identity(run.extra, _extra(folder))):
                continue
            if summarise_run(folder).status is RunStatus.FINISHED:
                seeds.add(int(other["seed"]))
        except (SurefootError, OSError, ValueError, KeyError, TypeError):
            continue
    return seeds


def _extra(folder: Path) -> Mapping[str, Any]:
    """The further facts of a run's record; empty where it has none."""
    record = folder / RECORD_NAME
    if not record.is_file():
        return {}
    found = json.loads(record.read_text("utf-8")).get("extra")
    return found if isinstance(found, Mapping) else {}
