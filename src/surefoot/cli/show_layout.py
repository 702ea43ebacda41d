"""`surefoot show layout`: what each rank of a layout holds, computed in one process."""

from __future__ import annotations

from typing import Annotated

import typer

from surefoot.cli.session import DebugOption, JsonOption, Session, SetOption, cells, table
from surefoot.observe.formatting import format_bytes, format_count

MAX_SHOWN = 16


def show_layout(
    context: typer.Context,
    recipe: Annotated[
        str, typer.Argument(metavar="RECIPE", help="A recipe file, or the name of a built-in one.")
    ],
    ranks: Annotated[int, typer.Option(min=1, metavar="N", help="Number of ranks.")],
    overrides: SetOption = None,
    json_file: JsonOption = None,
    debug: DebugOption = False,
) -> None:
    """Show the layout of a recipe over N ranks: axes, their costs, and bytes per rank.

    Built in one process without memory; a layout that real ranks refuse is refused here, too.
    """
    from surefoot.assembly.layout_rehearsal import rehearse_layout
    from surefoot.config.load import load_recipe

    session: Session = context.obj
    found = rehearse_layout(load_recipe(recipe, overrides or []).recipe, ranks)
    session.say(
        f"{format_count(found.num_parameters)} parameters on {ranks} ranks, "
        f"{found.sizes.data_parallel} of them data-parallel",
        style="bold",
    )
    axes = table("axis", "ranks", "costs")
    for row in found.sizes.table():
        axes.add_row(*cells(row.axis, row.size, row.costs))
    session.console.print(axes)
    if found.bubble_fraction is not None:
        session.say(f"pipeline bubble: ranks idle {found.bubble_fraction:.1%} of a window")
    held = table(
        "rank", "place", "parameters", "gradients", "optimizer", "gathered", "together",
        title="\nbytes per rank, without activations",
    )  # fmt: skip
    for share in found.shares[:MAX_SHOWN]:
        counted = (
            share.parameter_bytes,
            share.gradient_bytes,
            share.optimizer_bytes,
            share.gathered_bytes,
            share.total_bytes,
        )
        place = ", ".join(f"{axis} {place}" for axis, place in share.coordinates.items())
        held.add_row(*cells(share.rank, place or "alone", *map(format_bytes, counted)))
    session.console.print(held)
    session.say("shown: the first and last rank of each stage, which represent the others")
    session.answer(
        {
            "ranks": ranks,
            "parameters": found.num_parameters,
            "axes": found.sizes.table(),
            "bubble_fraction": found.bubble_fraction,
            "shares": found.shares,
        }
    )
    session.next((f"surefoot train {recipe} --nproc N", "train it on N ranks of this machine"))
