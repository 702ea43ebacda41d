"""Whether a run's own files are still as the run wrote them. Reads; changes nothing.

Each event that begins a stretch holds the digest of the configuration that was written with it, and
each checkpoint its values and the digest of the metrics before it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from surefoot.config.load import ABSENT, Difference, Resolved, differences
from surefoot.core.errors import CheckpointError, RequestError
from surefoot.core.reports import Event
from surefoot.observe.events import read_events
from surefoot.observe.metrics_log import refuse_misfit
from surefoot.observe.run_folder import CONFIG_NAME, EVENTS_NAME, METRICS_NAME

SETTINGS_KEY: Final = "settings_as_written"
"""In `about`: the values of the configuration that the checkpoint was trained with."""
METRICS_KEY: Final = "metrics_digest"
"""In `about`: digest of the rows of the metrics log before the checkpoint."""
CONFIG_DIGEST: Final = "config_sha256"
"""In the events that begin a stretch, and in `about`: of the configuration file."""


def digest_of_config(resolved: Resolved[Any]) -> str:
    """Of the file that is written for this configuration."""
    return hashlib.sha256(resolved.as_yaml().encode("utf-8")).hexdigest()


def edited_settings(
    run: Path, now: Mapping[str, Any], about: Mapping[str, Any], events: Iterable[Event]
) -> list[Difference]:
    """What was changed in the configuration file of a run since the run wrote it.

    Args:
        run: its folder.
        now: the values that the file gives.
        about: of the checkpoint that the run would go on from.
        events: of the run.

    Returns:
        Nothing where the file is as it was written, or where the run has not kept its values.
    """
    written = {event.data.get(CONFIG_DIGEST) for event in events}
    found = hashlib.sha256((run / CONFIG_NAME).read_bytes()).hexdigest()
    kept = about.get(SETTINGS_KEY)
    if found in written or not isinstance(kept, Mapping):
        return []
    # Another version may know other fields.
    return [
        change for change in differences(kept, now) if ABSENT not in (change.before, change.after)
    ]


def refuse_edited_settings(changes: Iterable[Difference], accepted: Iterable[str]) -> None:
    """Refuses a configuration file that was changed by hand.

    Raises:
        RequestError: with the fields; the name of the file was not accepted.
    """
    changes = list(changes)
    if not changes or CONFIG_NAME in accepted:
        return
    raise RequestError(
        f"{CONFIG_NAME} was changed since the run wrote it, in {len(changes)} fields:\n  - "
        + "\n  - ".join(map(str, changes)),
        where=CONFIG_NAME,
        rule="what a run was trained with is what it wrote down",
        remedy="put the file back, and give changes with --set and --accept-change FIELD; or take "
        f"the file as it is with --accept-change {CONFIG_NAME}",
    )


def edited_files(run: Path, about: Mapping[str, Any], offset: int) -> dict[str, str]:
    """The files of a run that are not as it wrote them, with what is wrong; for a report.

    Args:
        run: its folder.
        about: of its newest complete checkpoint.
        offset: bytes of the metrics log before that checkpoint.
    """
    found: dict[str, str] = {}
    config, events = run / CONFIG_NAME, run / EVENTS_NAME
    written = {about.get(CONFIG_DIGEST)}
    if events.is_file():
        written |= {event.data.get(CONFIG_DIGEST) for event in read_events(events)}
    if not config.is_file():
        found[CONFIG_NAME] = "missing"
    elif written - {None} and hashlib.sha256(config.read_bytes()).hexdigest() not in written:
        found[CONFIG_NAME] = "changed since the run wrote it"
    try:
        refuse_misfit(run / METRICS_NAME, offset, str(about.get(METRICS_KEY) or ""))
    except CheckpointError as error:
        found[METRICS_NAME] = error.what
    return found
