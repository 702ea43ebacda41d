"""Shows errors: what, where, rule, remedy; and returns the exit code. Hides none.

A traceback is shown for unexpected errors, and for all with `--debug`.
"""

from __future__ import annotations

import errno
import os
import sys
import time
import traceback
from collections.abc import Iterator
from difflib import get_close_matches
from typing import Any

import typer
from rich.text import Text

from surefoot.cli.session import Session
from surefoot.core.errors import (
    EXIT_FAILED,
    EXIT_REQUEST,
    ConfigError,
    StopRequested,
    SurefootError,
    UserExitError,
)
from surefoot.core.interruption import no_exit

SECONDS_FOR_THE_FIRST = 2.0
"""How long a rank that fails because of another waits for that one's report."""
EXIT_INTERRUPTED = 130
"""Ctrl-C outside of training, by the shell's convention; training saves and ends with 75."""


def present(error: BaseException, session: Session) -> int:
    """Shows `error` and returns its exit code."""
    if isinstance(error, SystemExit):
        # Not raised by us: commands return their code. The command has not finished.
        try:
            with no_exit():
                raise error
        except UserExitError as exited:
            error = exited
        except SystemExit:
            return EXIT_FAILED
    if isinstance(error, BrokenPipeError) or (
        isinstance(error, OSError) and error.errno == errno.EPIPE
    ):
        # The reader of the pipe has closed it (`| head`). Python would raise again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED
    if session.is_rank and _fails_after_another(error):
        # Keep the error on one screen.
        return error.exit_code if isinstance(error, SurefootError) else EXIT_FAILED
    if isinstance(error, KeyboardInterrupt | typer.Abort):
        _say(session, "interrupted; earlier checkpoints are complete", style="bold yellow")
        return EXIT_INTERRUPTED
    if _is_usage_error(error):
        return _present_usage(error, session)
    if session.is_rank and not isinstance(error, StopRequested):
        _say(session, f"rank {os.environ.get('RANK')} failed first", style="bold red")
    if session.debug or not isinstance(error, SurefootError):
        trace = "".join(traceback.format_exception(error))
        session.errors.print(Text(trace.rstrip()), soft_wrap=True)
    if isinstance(error, SurefootError):
        _present_ours(error, session)
        code = error.exit_code
    else:
        kind = type(error).__name__
        _say(session, f"error: {kind}: {error}", style="bold red")
        _say(session, "  this error was unexpected; see the traceback above")
        code = EXIT_FAILED
    try:
        session.answer({"exit_code": code, "error": as_facts(error)})
    except OSError as unwritable:
        _say(session, f"error: the JSON answer was not written: {unwritable}", style="bold red")
    return code


def _fails_after_another(error: BaseException) -> bool:
    from surefoot.parallel.join import fails_first, is_of_lost_rank, lost_rank
    from surefoot.parallel.lost import How

    # A killed rank cannot report itself: others detect it in the meantime.
    lost = lost_rank(SECONDS_FOR_THE_FIRST if is_of_lost_rank(error) else 0.0)
    if lost is not None and lost.how is How.FAILED:
        # A launcher passes on the code of the first exit: let it be that of the failed rank.
        time.sleep(SECONDS_FOR_THE_FIRST)
    return not fails_first()


def as_facts(error: BaseException) -> dict[str, object]:
    """An error as data for `--json`."""
    facts: dict[str, object] = {"kind": type(error).__name__, "what": str(error)}
    if isinstance(error, SurefootError):
        facts |= {
            "what": error.what,
            "where": error.where,
            "rule": error.rule,
            "remedy": error.remedy,
        }
    if isinstance(error, ConfigError):
        facts["violations"] = list(error.violations)
    return facts


def _say(session: Session, text: str, style: str = "") -> None:
    session.errors.print(Text(text, style=style), soft_wrap=True)


def _present_ours(error: SurefootError, session: Session) -> None:
    _say(session, f"error: {error.what}", style="bold red")
    for label, text in (("where", error.where), ("rule", error.rule), ("do", error.remedy)):
        if text:
            _say(session, f"  {label}: {text}")


def _is_usage_error(error: BaseException) -> bool:
    # The class exists in click and as a copy inside typer; only its name is the same.
    return any(kind.__name__ == "ClickException" for kind in type(error).__mro__)


def _present_usage(error: Any, session: Session) -> int:
    if type(error).__name__ == "NoArgsIsHelpError":
        # The help is printed already, or is the message.
        _say(session, error.message)
        return EXIT_REQUEST
    _say(session, f"error: {_usage_message(error)}", style="bold red")
    context = getattr(error, "ctx", None)
    command = "surefoot" if context is None else context.command_path
    _say(session, f"  do: {command} --help")
    return EXIT_REQUEST


def _usage_message(error: Any) -> str:
    wrong = getattr(error, "option_name", None)
    context = getattr(error, "ctx", None)
    if type(error).__name__ != "NoSuchOption" or wrong is None or context is None:
        return str(error.format_message())
    message = f"no such option {wrong}"
    close = get_close_matches(wrong, list(_option_names(context)), n=1)
    if close:
        return f"{message}; did you mean {close[0]}?"
    if "--set" in _option_names(context):
        return f"{message}; set values of the recipe with --set section.key=value"
    return message


def _option_names(context: Any) -> Iterator[str]:
    for parameter in context.command.params:
        yield from (name for name in parameter.opts if name.startswith("-"))
