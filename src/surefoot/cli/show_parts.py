"""`surefoot show samplers` and others: the parts of one kind, with their packages.

One table per kind: ours and those of installed packages.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import EntryPoint

import typer

from surefoot.cli.session import DebugOption, JsonOption, Session, cells, table
from surefoot.core.doors import Door, origin_of, parts


@dataclass(frozen=True)
class Shelf:
    """One kind of part, and how a recipe names one."""

    door: Door
    what: str
    use: str


SHELVES = {
    "schedules": Shelf(Door.SCHEDULES, "The learning-rate schedules.", "schedule.kind=NAME"),
    "clips": Shelf(Door.CLIPS, "The ways to clip gradients.", "train.clip.kind=NAME"),
    "samplers": Shelf(Door.SAMPLERS, "The orders of the samples.", "sampler.kind=NAME"),
    "tasks": Shelf(Door.TASKS, "The meanings of the loss.", "task.kind=NAME"),
    "metrics": Shelf(
        Door.METRICS,
        "The metrics that installed packages bring; each task has its own besides.",
        "metrics.NAME.kind=NAME",
    ),
    "sources": Shelf(Door.SOURCES, "The kinds of data.", "data.kind=NAME"),
    "observers": Shelf(Door.OBSERVERS, "Who may read reports.", "'observers=[{kind: NAME}]'"),
    "sinks": Shelf(Door.SINKS, "Where numbers may go.", "'log.sinks=[{kind: NAME}]'"),
}


def show_shelf(word: str) -> Callable[..., None]:
    """The command that lists the parts of one kind."""
    shelf = SHELVES[word]

    def show(
        context: typer.Context, json_file: JsonOption = None, debug: DebugOption = False
    ) -> None:
        session: Session = context.obj
        rows = [described(entry) for entry in parts(shelf.door).values()]
        shown = table("name", "what", "from", "target")
        for row in rows:
            shown.add_row(*cells(row["name"], row["what"], row["from"], row["target"]))
        session.console.print(shown)
        session.answer({word: rows})
        custom = "or kind: custom with target: package.module:Name"
        session.next((f"surefoot train RECIPE --set {shelf.use}", f"use one; {custom}"))

    show.__doc__ = shelf.what
    return show


def described(entry: EntryPoint) -> dict[str, str]:
    """Name, first sentence, package and target of a part; imports it for the sentence."""
    try:
        what = (inspect.getdoc(entry.load()) or "").partition("\n")[0]
    except Exception as error:
        what = f"cannot be imported: {type(error).__name__}: {error}"
    return {
        "name": entry.name,
        "what": what,
        "from": origin_of(entry),
        "target": entry.value,
    }
