"""`surefoot check --only equivalence`: prints the comparison with one plain process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surefoot.cli.session import Session
from surefoot.core.errors import RequestError

if TYPE_CHECKING:
    from surefoot.verify.equivalence import Equivalence

Tell = Callable[[str], None]


@dataclass(frozen=True)
class Finished:
    """A finished check."""

    answer: dict[str, Any]
    """Includes `passed`."""
    say: Callable[[], None]
    """Prints the result."""


def check_equivalence(
    session: Session,
    recipe: str,
    overrides: list[str],
    num_ranks: int,
    against: list[str],
    folder: Path,
    tell: Tell,
) -> Finished:
    """Runs the check.

    Raises:
        RequestError: an unknown variant.
        SurefootError: the recipe cannot be compared.
    """
    from surefoot.config.load import load_recipe
    from surefoot.verify.equivalence import Way, prove_equivalence

    known = [way.value for way in Way]
    for name in against:
        if name not in known:
            raise RequestError(
                f"there is no variant {name!r} to compare",
                where="--against",
                rule=f"one of {', '.join(known)}",
                remedy="leave it out to compare all of them",
            )
    found = prove_equivalence(
        recipe,
        overrides,
        load_recipe(recipe, overrides),
        folder,
        num_ranks=num_ranks,
        ways=[Way(name) for name in against or known],
        tell=tell,
    )
    answer = {
        "passed": found.passed,
        "bound": found.bound,
        "computed_in": found.computed_in,
        "compared_in_evaluation_mode": found.stilled,
        "left_out_terms": found.left_out,
        "loss": found.loss,
        "samples": found.num_samples,
        "ways": found.compared,
    }
    return Finished(answer, lambda: _say(session, found))


def _say(session: Session, found: Equivalence) -> None:
    session.say(f"one process: loss {found.loss:.10g} over {found.num_samples} samples")
    for one in found.compared:
        if one.not_compared:
            session.say(f"  {one.way.value:<13} not compared: {one.not_compared}")
            continue
        word = "equal" if one.first_broken is None else f"DIFFERS: {one.first_broken}"
        session.say(
            f"  {one.way.value:<13} {word}; loss {one.loss_difference:.1e}, gradients "
            f"{one.largest_difference:.1e}{f' ({one.of})' if one.of else ''}   {one.how}"
        )
    if found.computed_in != "float64":
        session.say(f"  the model converts float64 to {found.computed_in}, so that is compared")
    if found.stilled:
        session.say(
            f"  {', '.join(found.stilled)}: compared in evaluation mode; in training they draw "
            "random numbers or use a whole micro-batch, so that results depend on the split"
        )
    for term, why in found.left_out.items():
        session.say(f"  loss term {term}: left out; {why}")
    compared = sum(not one.not_compared for one in found.compared)
    if found.passed:
        session.say(
            f"\nPASS equivalence: loss and every gradient equal in {compared} variants, within "
            f"{found.bound:g} relative",
            style="bold green",
        )
    else:
        first = next(one for one in found.compared if one.first_broken is not None)
        session.say(
            f"\nFAIL equivalence: {first.way.value} differs, first at {first.first_broken}",
            style="bold red",
        )
