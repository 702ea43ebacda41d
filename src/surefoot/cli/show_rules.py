"""`surefoot show rules`: what the audit and the doctor can find, and what each rule is about."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from surefoot.cli.session import DebugOption, JsonOption, Session, cells, table
from surefoot.core.errors import RequestError

if TYPE_CHECKING:
    from surefoot.diagnosis.causes.base import CauseInfo
    from surefoot.sanitizer.rules.base import RuleInfo


class Row(NamedTuple):
    """One rule or cause, with the package that brings it."""

    info: RuleInfo | CauseInfo
    family: str
    origin: str


def show_rules(
    context: typer.Context,
    code: Annotated[
        str | None, typer.Argument(metavar="[CODE]", help="One rule, by code or name.")
    ] = None,
    json_file: JsonOption = None,
    debug: DebugOption = False,
) -> None:
    """The rules of the audit (SF...) and of the doctor (SFD...); with a code, one of them."""
    session: Session = context.obj
    rows, left_out = _rows()
    if code is None:
        facts = [
            {"code": i.code, "slug": i.slug, "certainty": i.certainty, "origin": origin}
            for i, _, origin in rows
        ]
        session.answer({"rules": facts, "left_out": left_out})
        shown = table("code", "rule", "family", "certainty", "from", "what is wrong")
        for info, family, origin in rows:
            shown.add_row(
                *cells(info.code, info.slug, family, info.certainty.value, origin, info.title)
            )
        session.console.print(shown)
        for problem in left_out:
            session.say(problem, style="yellow")
        session.next((f"surefoot show rules {rows[0].info.code}", "explains one"))
        return
    found = next((row for row in rows if code in (row.info.code, row.info.slug)), None)
    if found is None:
        raise RequestError(
            f"there is no rule {code!r}",
            rule=f"codes go from {rows[0].info.code} to {rows[-1].info.code}",
            remedy="surefoot show rules lists them",
        )
    session.answer({"rule": found.info, "family": found.family, "origin": found.origin})
    _explain(session, found)


def _rows() -> tuple[list[Row], list[str]]:
    """All rules and causes, and what other packages bring that cannot be used."""
    from surefoot.diagnosis.causes import all_causes
    from surefoot.sanitizer.rules import OWN, registry

    rules = registry()
    rows = [Row(entry.info, entry.family, entry.origin) for entry in rules.entries.values()]
    rows += [Row(cause.info, cause.info.family, OWN) for cause in all_causes()]
    return rows, rules.left_out


def _explain(session: Session, row: Row) -> None:
    info = row.info
    session.say(f"{info.code} {info.slug}", style="bold")
    session.say(f"{row.family}; {info.severity.value}, {info.certainty.value}; from {row.origin}")
    session.say(f"\n{info.title}\n\nobserved: {info.observes}\n\nwhy it is bad: {info.why}")
    example = getattr(info, "example", "")
    if example:
        session.say("\nexample:")
        for line in example.splitlines():
            session.say(f"  {line}", style="dim")
    source = f"\nsource: {info.source}" if info.source else ""
    session.say(f"\nfix: {info.fix}{source}")
    if example:
        session.next((f"# surefoot: ignore[{info.code}] reason", "on a line, if it is on purpose"))
    else:
        session.next(("surefoot doctor RUN", "reads what a run recorded"))
