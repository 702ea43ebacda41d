"""Batches of updates that went wrong, saved below a run's artifacts for replay: safetensors, JSON.

Keeps a bounded number of batches per run, without pickle.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from surefoot.core.errors import RequestError
from surefoot.core.reports import Event
from surefoot.observe.files.atomic import atomic_write
from surefoot.observe.metrics_log import strict

BAD_BATCHES_NAME = "bad-batches"
EVENT_NAME = "event.json"
TENSORS_NAME = "batch.safetensors"
MAX_KEPT_BATCHES = 20
"""Largest number of batches kept per run, to bound disk use."""


def keep_batch(
    artifacts: Path, event: Event, batches: Sequence[object], more: Mapping[str, object]
) -> Path | None:
    """Writes the micro-batches of a window and its event; returns their folder.

    A window that is saved already is overwritten: it has run again.

    Args:
        artifacts: folder of the run's artifacts.
        event: its data holds `window`.
        batches: the data of its micro-batches.
        more: further facts for the event file.

    Returns:
        None if the limit is reached.
    """
    above = artifacts / BAD_BATCHES_NAME
    folder = above / f"window-{int(str(event.data['window'])):08d}"
    if not folder.exists():
        if above.exists() and sum(1 for _ in above.iterdir()) >= MAX_KEPT_BATCHES:
            return None
        folder.mkdir(parents=True)
    tensors = {
        name: tensor.detach().cpu().contiguous().clone()
        for index, batch in enumerate(batches)
        for name, tensor in _tensors(batch, str(index))
    }
    save_file(tensors, folder / TENSORS_NAME)
    fields = {"kind": str(event.kind), "step": event.step, "message": event.message}
    content = strict({**fields, "data": dict(event.data), **more})
    atomic_write(folder / EVENT_NAME, json.dumps(content, indent=1, default=repr) + "\n")
    return folder


def read_event(path: Path) -> tuple[Path, dict[str, object]]:
    """The run folder and the content of an event file; `path` is the file or its folder.

    Raises:
        RequestError: `path` is not an event file.
    """
    file = path / EVENT_NAME if path.is_dir() else path
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        content["data"]["window"] = int(content["data"]["window"])
        run = file.resolve().parents[3]
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        raise RequestError(
            f"this is not an event that can be replayed: {error}",
            where=str(path),
            rule="an event is a folder below a run's artifacts/bad-batches, or its event.json",
            remedy="see events.jsonl of the run: an event to replay names its `evidence`",
        ) from error
    return run, content


def _tensors(value: object, name: str) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _tensors(item, f"{name}.{key}")
    elif isinstance(value, tuple | list):
        for index, item in enumerate(value):
            yield from _tensors(item, f"{name}.{index}")
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from _tensors(getattr(value, field.name), f"{name}.{field.name}")
