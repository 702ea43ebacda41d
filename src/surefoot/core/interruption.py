"""The exception that abandons work because the run is to stop. It is not an error."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from surefoot.core.errors import UserExitError

RAISED_BY_USER_CODE: Final = (Exception, SystemExit)
"""What code of the user's own raises where it fails. A `sys.exit()` in the middle of a run is a
failure of that run, whatever its code: nobody may take it for the run's own end."""


@contextmanager
def no_exit() -> Iterator[None]:
    """A `sys.exit()` of code that runs inside is an error: the run has not reached its end.

    Raises:
        UserExitError: with the exit code that was asked for.
    """
    try:
        yield
    except SystemExit as error:
        if isinstance(error.__context__, BrokenPipeError):
            raise  # Rich, where nobody reads what is printed any more (`| head`).
        raise UserExitError(
            f"code of this run called sys.exit({error.code!r}) before the run was at its end",
            where=_last_line(error),
            rule="model, loss, data and observers run inside the training and do not end its "
            "process",
            remedy="raise an exception there; to end a run early use train.horizon, early_stopping "
            "or Ctrl-C",
        ) from error


def _last_line(error: BaseException) -> str:
    """Where it was raised, as file:line."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return f"{trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}" if trace is not None else ""


class CutShort(BaseException):
    """Work was abandoned; its result must not be used, and repeating it gives the same.

    Not an `Exception`, so that no error handler catches it.
    """


ShouldAbort = Callable[[], bool]
"""Returns True if repeatable work is to be abandoned."""


def never() -> bool:
    """Never abandons work."""
    return False
