"""Reads a run folder: metrics, events, and what configuration and record say. Changes nothing."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from surefoot.config.yaml_text import read_yaml
from surefoot.core.errors import SurefootError
from surefoot.diagnosis.readers.rows import add_row
from surefoot.diagnosis.recording import Recording, RecordingBuilder
from surefoot.observe.events import read_events
from surefoot.observe.metrics_log import read_rows
from surefoot.observe.run_folder import CONFIG_NAME, EVENTS_NAME, METRICS_NAME, RECORD_NAME


def is_run_folder(path: Path) -> bool:
    """Whether a run of ours has begun there."""
    return (path / CONFIG_NAME).is_file() or (path / EVENTS_NAME).is_file()


def read_run_folder(path: Path) -> Recording:
    """One run of ours; a file that a crash has not let it write is left out.

    Raises:
        DataError: the metrics log is damaged inside.
    """
    builder = RecordingBuilder(str(path), "run folder")
    if (path / METRICS_NAME).is_file():
        for row in read_rows(path / METRICS_NAME):
            add_row(builder, row)
    if (path / EVENTS_NAME).is_file():
        builder.events.extend(read_events(path / EVENTS_NAME))
    builder.facts.update(_facts_of_config(path / CONFIG_NAME))
    builder.facts.update(_facts_of_record(path / RECORD_NAME))
    return builder.build()


def _facts_of_config(path: Path) -> dict[str, object]:
    try:
        config: Any = read_yaml(path.read_text(encoding="utf-8"), path.name)[0]
    except (OSError, SurefootError):
        return {}
    found = {
        "clip_norm": _at(config, "train", "clip_norm"),
        "optimizer": _at(config, "optimizer", "kind"),
        "momentum": _at(config, "optimizer", "momentum"),
        "schedule": _at(config, "schedule", "kind"),
        "precision": _at(config, "precision", "dtype"),
        "non_finite": _at(config, "guard", "non_finite"),
    }
    return {name: value for name, value in found.items() if value is not None}


def _facts_of_record(path: Path) -> dict[str, object]:
    try:
        extra: Any = json.loads(path.read_text(encoding="utf-8")).get("extra", {})
    except (OSError, ValueError):
        return {}
    found = {
        "precision": _at(extra, "precision", "name"),
        "horizon_updates": _at(extra, "horizon_updates"),
        "device": _at(extra, "device"),
    }
    return {name: value for name, value in found.items() if value is not None}


def _at(value: Any, *keys: str) -> Any:
    for key in keys:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value
