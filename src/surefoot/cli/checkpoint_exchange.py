"""`surefoot checkpoint export | import`: weights to and from other programs, not for resuming."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from surefoot.cli.session import DebugOption, JsonOption, Session
from surefoot.core.errors import EXIT_DONE, RequestError

FORMATS = ("transformers", "safetensors", "pt")
WEIGHTS = ("raw", "ema")
MAX_LISTED = 8


def export(
    context: typer.Context,
    path: Annotated[
        Path,
        typer.Argument(metavar="PATH", help="A run folder (its newest checkpoint) or checkpoint."),
    ],
    out: Annotated[Path, typer.Option(metavar="DIR", help="The folder to create.")],
    format_: Annotated[
        str | None,
        typer.Option(
            "--format",
            metavar="|".join(FORMATS),
            help="Default: transformers if the model has a counterpart there, else safetensors.",
        ),
    ] = None,
    weights: Annotated[
        str,
        typer.Option(metavar="|".join(WEIGHTS), help="Trained weights, or their average."),
    ] = "raw",
    json_file: JsonOption = None,
    debug: DebugOption = False,
) -> int:
    """Write the weights of a run for other programs."""
    from surefoot.state.interop import export_weights

    session: Session = context.obj
    if format_ is not None and format_ not in FORMATS:
        raise RequestError(
            f"unknown format {format_!r}", where="--format", rule=f"one of {', '.join(FORMATS)}"
        )
    if weights not in WEIGHTS:
        raise RequestError(
            f"unknown weights {weights!r}",
            where="--weights",
            rule=f"one of {', '.join(WEIGHTS)}",
        )
    made = export_weights(path, out, format_, which=weights)  # type: ignore[arg-type]
    session.answer({"exit_code": EXIT_DONE, **vars(made)})
    session.say(
        f"{made.folder}: step {made.step}, {made.tensors} tensors ({made.weights}) as {made.format}"
    )
    session.say(f"  {', '.join(made.files)}", style="dim")
    if made.note:
        session.say(f"note: {made.note}", style="dim")
    loads = {
        "transformers": f'AutoModelForCausalLM.from_pretrained("{out}")',
        "safetensors": f'safetensors.torch.load_file("{out / "model.safetensors"}")',
        "pt": f'torch.load("{out / "model.pt"}", weights_only=True)',
    }
    session.next((loads[made.format], "load it in Python"))
    return EXIT_DONE


def import_(
    context: typer.Context,
    path: Annotated[
        Path,
        typer.Argument(
            metavar="PATH",
            help="A .pt, .ckpt or safetensors file, an index of shards, a transformers folder or "
            "a distributed checkpoint.",
        ),
    ],
    out: Annotated[Path, typer.Option(metavar="FILE", help="The safetensors file to write.")],
    json_file: JsonOption = None,
    debug: DebugOption = False,
) -> int:
    """Import the weights of another program's checkpoint, without running code in it."""
    from surefoot.state.foreign import import_weights

    session: Session = context.obj
    if out.suffix != ".safetensors":
        raise RequestError(
            f"{out.name} does not end in .safetensors",
            where="--out",
            rule="model.initial_weights reads safetensors",
        )
    made = import_weights(path, out)
    session.answer({"exit_code": EXIT_DONE, **vars(made)})
    session.say(f"{made.kind}: {made.tensors} tensors, {made.elements:,} elements → {out}")
    for note in made.notes:
        session.say(f"note: {note}")
    if made.left_out:
        listed = ", ".join(made.left_out[:MAX_LISTED])
        more = len(made.left_out) - MAX_LISTED
        session.say(f"not imported: {listed}" + (f" and {more} more" if more > 0 else ""))
    if made.model:
        session.say("\nmodel section of a recipe that fits:\nmodel:")
        for name, value in made.model.items():
            session.say(f"  {name}: {str(value).lower() if isinstance(value, bool) else value}")
        session.say(f"  initial_weights: {out}")
    session.next((f"surefoot train RECIPE --set model.initial_weights={out}", "start from them"))
    return EXIT_DONE
