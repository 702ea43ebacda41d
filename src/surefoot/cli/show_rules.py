"""`surefoot show rules`: what the audit and the doctor can find, and what each rule is about."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from surefoot.cli.session import DebugOption, JsonOption, Session, cells, table
from surefoot.core.errors import RequestError

if TYPE_CHECKING:
    from surefoot.diagnosis.causes.base import CauseInfo
    from surefoot.sanitizer.rules.base import RuleInfo


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
    infos = _infos()
    if code is None:
        facts = [{"code": i.code, "slug": i.slug, "certainty": i.certainty} for i in infos]
        session.answer({"rules": facts})
        shown = table("code", "rule", "family", "certainty", "what is wrong")
        for info in infos:
            shown.add_row(
                *cells(info.code, info.slug, info.family, info.certainty.value, info.title)
            )
        session.console.print(shown)
        session.next((f"surefoot show rules {infos[0].code}", "explains one"))
        return
    found = next((info for info in infos if code in (info.code, info.slug)), None)
    if found is None:
        raise RequestError(
            f"there is no rule {code!r}",
            rule=f"codes go from {infos[0].code} to {infos[-1].code}",
            remedy="surefoot show rules lists them",
        )
    session.answer({"rule": found})
    _explain(session, found)


def _infos() -> list[RuleInfo | CauseInfo]:
    from surefoot.diagnosis.causes import all_causes
    from surefoot.sanitizer.rules import all_rules

    rules: list[RuleInfo | CauseInfo] = [rule.info for rule in all_rules()]
    return [*rules, *(cause.info for cause in all_causes())]


def _explain(session: Session, info: RuleInfo | CauseInfo) -> None:
    session.say(f"{info.code} {info.slug}", style="bold")
    session.say(f"{info.family}; {info.severity.value}, {info.certainty.value}\n\n{info.title}")
    session.say(f"\nobserved: {info.observes}\n\nwhy it is bad: {info.why}")
    example = getattr(info, "example", "")
    if example:
        session.say("\nexample:")
        for line in example.splitlines():
            session.say(f"  {line}", style="dim")
    session.say(f"\nfix: {info.fix}\nsource: {info.source}")
    if example:
        session.next((f"# surefoot: ignore[{info.code}] reason", "on a line, if it is on purpose"))
    else:
        session.next(("surefoot doctor RUN", "reads what a run recorded"))
