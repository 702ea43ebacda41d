"""`surefoot show rules` and `causes`: the rules of the audit and the causes of the doctor."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from surefoot.cli.session import DebugOption, JsonOption, Session, cells, table
from surefoot.core.errors import RequestError

if TYPE_CHECKING:
    from surefoot.diagnosis.causes.base import CauseInfo
    from surefoot.sanitizer.rules.base import RuleInfo


class Row(NamedTuple):
    """One rule or cause, with the package that provides it."""

    info: RuleInfo | CauseInfo
    family: str
    origin: str


CodeArgument = Annotated[
    str | None, typer.Argument(metavar="[CODE]", help="Explain this one, by code or name.")
]


def show_rules(
    context: typer.Context,
    code: CodeArgument = None,
    json_file: JsonOption = None,
    debug: DebugOption = False,
) -> None:
    """List the rules of the audit (SF...) and the causes of the doctor (SFD...), or explain one."""
    from surefoot.sanitizer.rules import registry

    rules, (causes, left_out) = registry(), _causes()
    rows = [Row(entry.info, entry.family, entry.origin) for entry in rules.entries.values()]
    _list_or_explain(context.obj, "rule", [*rows, *causes], [*rules.left_out, *left_out], code)


def show_causes(
    context: typer.Context,
    code: CodeArgument = None,
    json_file: JsonOption = None,
    debug: DebugOption = False,
) -> None:
    """List the causes that the doctor knows (SFD...), or explain one."""
    _list_or_explain(context.obj, "cause", *_causes(), code)


def _causes() -> tuple[list[Row], list[str]]:
    """All causes, and what other packages bring that cannot be used."""
    from surefoot.diagnosis.causes import all_causes, cause_registry

    rows = [Row(cause.info, cause.info.family, cause.origin) for cause in all_causes()]
    return rows, [str(left_out) for left_out in cause_registry().left_out]


def _list_or_explain(
    session: Session, kind: str, rows: list[Row], left_out: list[str], code: str | None
) -> None:
    if code is None:
        facts = [
            {"code": i.code, "slug": i.slug, "certainty": i.certainty, "origin": origin}
            for i, _, origin in rows
        ]
        session.answer({f"{kind}s": facts, "left_out": left_out})
        shown = table("code", kind, "family", "certainty", "from", "what is wrong")
        for info, family, origin in rows:
            shown.add_row(
                *cells(info.code, info.slug, family, info.certainty.value, origin, info.title)
            )
        session.console.print(shown)
        for problem in left_out:
            session.say(problem, style="yellow")
        session.next((f"surefoot show {kind}s {rows[0].info.code}", "explain one"))
        return
    found = next((row for row in rows if code in (row.info.code, row.info.slug)), None)
    if found is None:
        raise RequestError(
            f"unknown {kind} {code!r}",
            rule=f"codes are from {rows[0].info.code} to {rows[-1].info.code}",
            remedy=f"list them with `surefoot show {kind}s`",
        )
    session.answer({kind: found.info, "family": found.family, "origin": found.origin})
    _explain(session, found)


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
        session.next((f"# surefoot: ignore[{info.code}] reason", "on a line, if it is intended"))
    else:
        session.next(("surefoot doctor RUN", "diagnose a run"))
