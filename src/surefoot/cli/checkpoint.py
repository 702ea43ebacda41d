"""`surefoot checkpoint inspect | verify`: contents and integrity of checkpoints. Read-only."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from surefoot.cli.session import DebugOption, JsonOption, Session, cells, table
from surefoot.core.errors import EXIT_DONE, EXIT_FOUND, CheckpointError, RequestError

if TYPE_CHECKING:
    from surefoot.state.manifest import Manifest

app = typer.Typer(help="Inspect, verify, export and import checkpoints.", no_args_is_help=True)

WHOLE = "whole"
PROGRESS_SHOWN = ("step", "window", "epoch", "samples", "tokens", "evaluated_step", "cursor")


@app.command()
def inspect(
    context: typer.Context,
    path: Annotated[
        Path,
        typer.Argument(metavar="PATH", help="A checkpoint, or a run folder (newest checkpoint)."),
    ],
    tensors: Annotated[
        bool, typer.Option("--tensors", help="List every tensor, not only totals per part.")
    ] = False,
    json_file: JsonOption = None,
    debug: DebugOption = False,
) -> int:
    """Show what a checkpoint contains, after verifying the digest of every file."""
    session: Session = context.obj
    folder = _find_all(path)[-1]
    manifest, progress, damage = _look(folder)
    session.say(f"{folder}", style="bold")
    if manifest is None:
        session.say(f"\ndamaged: {damage}", style="bold red")
        session.answer({"folder": folder, "whole": False, "damage": str(damage)})
        return _advise_other(session)
    parts = _parts(manifest)
    session.say(f"  step {manifest.step}, {manifest.kind}, schema {manifest.schema_version}")
    for name, value in {**progress, **manifest.about}.items():
        if name == "settings":
            continue  # Of a custom loop; a run has them in config.yaml. Part of the JSON answer.
        session.say(f"  {name}: {value if isinstance(value, str) else json.dumps(value)}")
    _print_parts(session, parts)
    if tensors:
        _print_tensors(session, manifest)
    if damage is None:
        session.say(f"\ncomplete: {len(manifest.files)} files have the expected digest")
    else:
        session.say(f"\ndamaged: {damage}", style="bold red")
    session.answer(
        {
            "folder": folder,
            "step": manifest.step,
            "kind": manifest.kind,
            "whole": damage is None,
            "damage": None if damage is None else str(damage),
            "progress": progress,
            "about": manifest.about,
            "parts": parts,
            "files": manifest.files,
            "tensors": manifest.tensors if tensors else {},
        }
    )
    if damage is not None:
        return _advise_other(session)
    if "settings" in manifest.about:
        session.next((f'step.resume("{folder.parent}")', "resume from the newest checkpoint"))
    elif folder.parent.name == "checkpoints":
        run = folder.parent.parent
        command = f"surefoot train --resume {run}"
        if manifest.about.get("architecture", "unknown") is None:
            command = f'trainer.fit(resume="{run}")'
        session.next((command, "resume from the newest checkpoint"))
    return EXIT_DONE


def _look(folder: Path) -> tuple[Manifest | None, dict[str, Any], CheckpointError | None]:
    """The manifest (None if unreadable), the progress in the state, and the error, if any."""
    from surefoot.state.checkpoint import read_checkpoint
    from surefoot.state.manifest import read_manifest
    from surefoot.state.run_state import naming_state

    manifest = None
    try:
        manifest = read_manifest(folder)
        _, snapshot = read_checkpoint(folder)
        with naming_state():
            progress = dict(snapshot.values["progress"])
    except CheckpointError as error:
        return manifest, {}, error
    return manifest, {key: progress[key] for key in PROGRESS_SHOWN if key in progress}, None


def _advise_other(session: Session) -> int:
    session.next(("surefoot train --resume RUN", "resume from the newest complete checkpoint"))
    return EXIT_FOUND


@app.command("verify")
def verify_all(
    context: typer.Context,
    path: Annotated[
        Path,
        typer.Argument(metavar="PATH", help="A run folder (all its checkpoints) or a checkpoint."),
    ],
    json_file: JsonOption = None,
    debug: DebugOption = False,
) -> int:
    """Check the digest of every file, and that nothing needed for a resume is missing.

    Of a run folder its config.yaml and metrics.jsonl too: they must be as the run wrote them.
    """
    from surefoot.state.commit import TEMPORARY_SUFFIX
    from surefoot.state.manifest import STEP_PREFIX

    session: Session = context.obj
    folders = _find_all(path)
    verdicts = [_verdict(folder) for folder in folders]
    shown = table("checkpoint", "size", "verdict")
    for verdict in verdicts:
        shown.add_row(*cells(verdict["name"], verdict["size"], verdict["verdict"]))
    edited = _edited_files(path, folders)
    for name, what in edited.items():
        shown.add_row(*cells(name, "", what))
    session.console.print(shown)
    for left in sorted(folders[0].parent.glob(f"{STEP_PREFIX}*{TEMPORARY_SUFFIX}")):
        session.say(f"{left.name}: of an unfinished save, not a checkpoint", style="dim")
    session.answer({"checkpoints": verdicts, "edited": edited})
    whole = [verdict for verdict in verdicts if verdict["verdict"] == WHOLE]
    if len(whole) == len(verdicts):
        return EXIT_FOUND if edited else EXIT_DONE
    if whole and folders[0].parent.name == "checkpoints":
        resume = f"surefoot train --resume {folders[0].parent.parent}"
        session.next((resume, f"resume from {whole[-1]['name']}, the newest complete one"))
    return EXIT_FOUND


def _edited_files(path: Path, folders: list[Path]) -> dict[str, str]:
    """What was changed by hand in the folder of a run; nothing for a lone checkpoint."""
    from surefoot.observe.run_folder import CHECKPOINTS_NAME, CONFIG_NAME
    from surefoot.run.edits import edited_files
    from surefoot.state.checkpoint import read_checkpoint
    from surefoot.state.run_state import naming_state

    run = folders[0].parent.parent
    if path.resolve() == folders[0].resolve() or folders[0].parent.name != CHECKPOINTS_NAME:
        return {}
    if not (run / CONFIG_NAME).is_file():
        return {}
    for folder in reversed(folders):
        try:
            manifest, snapshot = read_checkpoint(folder)
            with naming_state():
                offset = int(snapshot.values["log_offsets"]["metrics"])
        except CheckpointError:
            continue
        return edited_files(run, manifest.about, offset)
    return {}


def _verdict(folder: Path) -> dict[str, str]:
    from surefoot.observe.formatting import format_bytes
    from surefoot.state.checkpoint import read_checkpoint
    from surefoot.state.completeness import missing_items
    from surefoot.state.run_state import naming_state

    size = sum(file.stat().st_size for file in folder.iterdir() if file.is_file())
    try:
        manifest, snapshot = read_checkpoint(folder)
        with naming_state():
            missing = missing_items(manifest, snapshot)
        verdict = WHOLE if not missing else f"incomplete: missing {', '.join(missing)}"
    except CheckpointError as error:
        verdict = f"damaged: {error.what}"
    return {"name": folder.name, "size": format_bytes(size), "verdict": verdict}


def _find_all(path: Path) -> list[Path]:
    """The checkpoints that `path` means, oldest first.

    Raises:
        RequestError: there are none.
    """
    from surefoot.state.checkpoint_search import checkpoints_at
    from surefoot.state.manifest import MANIFEST_NAME

    if found := checkpoints_at(path):
        return found
    raise RequestError(
        "no checkpoint was found" if path.is_dir() else "the folder does not exist",
        where=str(path),
        rule=f"a checkpoint is a folder with a {MANIFEST_NAME}; unfinished ones have none",
        remedy="list the runs and their newest checkpoints with `surefoot runs`",
    )


def _parts(manifest: Manifest) -> dict[str, dict[str, int]]:
    """Tensors, elements and bytes of each part of the state (model, optimizer, ...)."""
    import math

    import torch

    parts: dict[str, dict[str, int]] = {}
    for name, entry in manifest.tensors.items():
        part = parts.setdefault(
            name.partition("/")[0], {"tensors": 0, "elements": 0, "size_bytes": 0}
        )
        elements = math.prod(entry.shape)
        part["tensors"] += 1
        part["elements"] += elements
        # For an unknown dtype the size is unknown: the checkpoint is damaged.
        dtype = getattr(torch, entry.dtype, None)
        part["size_bytes"] += elements * (dtype.itemsize if isinstance(dtype, torch.dtype) else 0)
    return parts


def _print_parts(session: Session, parts: dict[str, dict[str, int]]) -> None:
    from surefoot.observe.formatting import format_bytes

    shown = table("part", "tensors", "elements", "size")
    for name, part in parts.items():
        size = format_bytes(part["size_bytes"])
        shown.add_row(*cells(name, part["tensors"], f"{part['elements']:,}", size))
    session.say("")
    session.console.print(shown)


def _print_tensors(session: Session, manifest: Manifest) -> None:
    shown = table("tensor", "dtype", "shape")
    for name, entry in manifest.tensors.items():
        shown.add_row(*cells(name, entry.dtype, list(entry.shape)))
    session.say("")
    session.console.print(shown)
