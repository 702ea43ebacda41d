"""Every error a user can meet: what happened, where, which rule was broken, and the remedy.

Imports nothing but the standard library, so that a bad recipe is answered without loading torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

EXIT_DONE = 0
EXIT_FOUND = 1
EXIT_REQUEST = 2
EXIT_FAILED = 3
EXIT_STOPPED = 75

GO_ON_FROM_OLDER = "use an older checkpoint: surefoot train --resume RUN/checkpoints/step-N"


class SurefootError(Exception):
    """Base of all our errors.

    Args:
        what: what happened, in one sentence.
        where: a dotted config path, a file and line, a tensor name, a sample id.
        rule: the rule that was broken.
        remedy: what the user can do now.

    >>> print(SurefootError("the disk is full", where="/data", remedy="free 2 GiB"))
    the disk is full
      where: /data
      do: free 2 GiB
    """

    exit_code = EXIT_FAILED

    def __init__(self, what: str, *, where: str = "", rule: str = "", remedy: str = "") -> None:
        self.what = what
        self.where = where
        self.rule = rule
        self.remedy = remedy
        super().__init__(what)

    def __str__(self) -> str:
        lines = [self.what]
        lines += [
            f"  {label}: {text}"
            for label, text in (("where", self.where), ("rule", self.rule), ("do", self.remedy))
            if text
        ]
        return "\n".join(lines)

    def __reduce__(self) -> tuple[object, ...]:
        # The default reduction keeps only `args` and would lose the keyword fields when an error is
        # sent between processes (a data worker).
        return (_rebuild, (type(self), self.__dict__.copy(), self.args))


def _rebuild(
    kind: type[SurefootError], fields: dict[str, object], args: tuple[object, ...]
) -> SurefootError:
    error = kind.__new__(kind, *args)
    error.args = args
    error.__dict__.update(fields)
    return error


class RequestError(SurefootError):
    """The request itself is wrong; nothing was started."""

    exit_code = EXIT_REQUEST


class MixedUnitsError(RequestError, TypeError):
    """Two counts of different units were added, compared or divided."""


@dataclass(frozen=True, slots=True)
class Violation:
    """One thing wrong with a recipe."""

    path: str
    """Dotted path of the key, such as `optimizer.lr`."""
    origin: str
    """Origin of the value: a file name, `override`, or `default`."""
    rule: str
    remedy: str = ""

    def __str__(self) -> str:
        remedy = f"; {self.remedy}" if self.remedy else ""
        place = f"{self.path} ({self.origin})" if self.path else f"({self.origin})"
        return f"{place}: {self.rule}{remedy}"


class ConfigError(RequestError):
    """A recipe violates one or more rules; all violations are listed.

    >>> print(ConfigError([Violation("optimizer.lr", "my.yaml:3", "must be above 0")]))
    1 problem in the configuration:
      - optimizer.lr (my.yaml:3): must be above 0
    """

    def __init__(self, violations: Sequence[Violation]) -> None:
        self.violations = tuple(violations)
        count = len(self.violations)
        lines = "\n".join(f"  - {violation}" for violation in self.violations)
        super().__init__(
            f"{count} problem{'s' if count != 1 else ''} in the configuration:\n{lines}"
        )


class DataError(SurefootError):
    """Data is missing, unreadable or of a wrong shape or range."""

    batch_position: int | None = None
    """Row of the batch that is at fault, if it is a single one; the loader knows its sample id."""


class MissingDataError(DataError, RequestError):
    """A data folder or file named in the recipe does not exist or is empty."""

    exit_code = EXIT_REQUEST


class LoaderStuckError(DataError):
    """A data worker did not answer within its deadline."""


class ModelError(SurefootError):
    """A model cannot be built, called or trained as asked."""


class NonFiniteError(SurefootError):
    """A loss or gradient was NaN or infinite, and the guard's policy is to stop."""


class SpikeError(SurefootError):
    """One spike more than the guard may skip or roll back."""


class CheckpointError(SurefootError):
    """A checkpoint is damaged, incomplete or belongs to another model."""


class DiskRefusedError(CheckpointError):
    """The disk refused a checkpoint; nothing was published and older ones are untouched."""

    needed_bytes: int | None = None
    """Size of the checkpoint, if known."""
    free_bytes: int | None = None
    """Free space at that moment, if known."""


class DiskFullError(DiskRefusedError):
    """A checkpoint does not fit on its disk; nothing was published and older ones are untouched."""


class RankError(SurefootError):
    """Ranks of one run have lost each other: one is missing, or they disagree."""


class RunFolderError(RequestError):
    """A run folder exists already, is in use, is missing or has too little free space."""


class UserExitError(SurefootError):
    """Code of the user's own called `sys.exit()` in the middle of a run."""


class StopRequested(SurefootError):
    """The run was asked to stop and has saved; it can be resumed."""

    exit_code = EXIT_STOPPED
