"""What a cause is: a page with its words, what it needs, and a function that looks for its signs.

A cause judges by the features of one log. It never prints and never reads a file.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from string import Formatter

from surefoot.core.finding import Certainty, Finding, Severity
from surefoot.diagnosis.log_features.log import QUANTITIES, LogFeatures
from surefoot.diagnosis.needs import Need

SENTENCES = re.compile(r"(?<=[.!?]) (?=[A-Z{])")


@dataclass(frozen=True, slots=True)
class SignText:
    """What is said where a sign was seen.

    Args:
        score: how well the cause fits then, from 0 to 1; the highest is named first.
        message: with its numbers as `{name:format}`; a sentence of which one is None is left out.
        certainty: where it is another than that of the cause.
    """

    score: float
    message: str
    certainty: Certainty | None = None


@dataclass(frozen=True, slots=True)
class CauseInfo:
    """What a cause is about, in words; `read_page` reads it from a page.

    Args:
        code: stable and unique, such as `SFD101`.
        slug: stable and unique name, words joined by `-`.
        family: the group under which it is listed.
        title: one sentence: what went wrong.
        observes: what is looked at, and where the cause is not named.
        fix: the first thing to try, then others.
        signs: by name, what is said of each.
        evidence: names of `QUANTITIES` that stand in the evidence of every sign.
        explains: slugs of causes that are only its consequence where both are found.
    """

    code: str
    slug: str
    family: str
    severity: Severity
    certainty: Certainty
    title: str
    observes: str
    why: str
    fix: str
    source: str
    signs: Mapping[str, SignText]
    evidence: tuple[str, ...] = ()
    explains: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Sign:
    """What a cause has seen in a log; `sign` makes one.

    Args:
        name: one of the signs of the cause.
        numbers: what its message names, unless it is one of `QUANTITIES`, and further evidence.
        score: where it is another than that of the `SignText`.
    """

    name: str
    numbers: Mapping[str, object]
    score: float | None = None


def sign(name: str, *, score: float | None = None, **numbers: object) -> Sign:
    """The sign of that name, with the numbers in its message."""
    return Sign(name, numbers, score)


@dataclass(frozen=True, slots=True)
class Observation:
    """A sign in words: see `SignText`."""

    message: str
    score: float
    certainty: Certainty
    evidence: Mapping[str, object] = field(default_factory=dict)


Look = Callable[[LogFeatures], Sign | None]


@dataclass(frozen=True, slots=True)
class Cause:
    """One kind of bad run; `cause` makes it of a function.

    Args:
        needs: what must have been recorded; it is asked only where all of it was.
        look: the sign that it sees in a log, or None.
        min_losses: rows with a loss below which it is not asked.
        only_finite: whether it is asked only where loss and gradient norm are finite in all rows.
        origin: the package that brings it.
    """

    info: CauseInfo
    needs: tuple[Need, ...]
    look: Look
    min_losses: int = 0
    only_finite: bool = False
    origin: str = "surefoot"

    def observe(self, log: LogFeatures) -> Observation | None:
        """What it has to say of a log."""
        if len(log.loss) < self.min_losses or (self.only_finite and not log.is_finite):
            return None
        seen = self.look(log)
        if seen is None:
            return None
        text = self.info.signs[seen.name]
        named = [name for _, name, _, _ in Formatter().parse(text.message) if name]
        further = [name for name in (*self.info.evidence, *named) if name not in seen.numbers]
        evidence = {**seen.numbers, **{name: QUANTITIES[name](log) for name in further}}
        message = _known_sentences(text.message, evidence).format_map(evidence)
        score = text.score if seen.score is None else seen.score
        return Observation(message, score, text.certainty or self.info.certainty, evidence)

    def finding(self, seen: Observation, file: str) -> Finding:
        info = self.info
        return Finding(
            code=info.code,
            slug=info.slug,
            severity=info.severity,
            certainty=seen.certainty,
            message=seen.message,
            file=file,
            evidence=dict(seen.evidence),
            fix=info.fix,
        )


def _known_sentences(message: str, evidence: Mapping[str, object]) -> str:
    """The sentences of a message whose numbers are all known."""

    def is_known(sentence: str) -> bool:
        names = (name for _, name, _, _ in Formatter().parse(sentence) if name)
        return all(evidence[name] is not None for name in names)

    return " ".join(filter(is_known, SENTENCES.split(message)))


def cause(
    info: CauseInfo, needs: tuple[Need, ...], min_losses: int = 0, only_finite: bool = False
) -> Callable[[Look], Cause]:
    """Makes a `Cause` of the function below it."""

    def make(look: Look) -> Cause:
        origin = look.__module__.partition(".")[0]
        return Cause(info, needs, look, min_losses, only_finite, origin)

    return make
