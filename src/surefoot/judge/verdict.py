"""The form of a verdict: clauses that are held, broken or not shown."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum


class Standing(StrEnum):
    """State of a clause."""

    HELD = "held"
    BROKEN = "broken"
    NOT_SHOWN = "not enough evidence"


@dataclass(frozen=True, slots=True)
class Clause:
    """One clause of a contract, and what was found."""

    name: str
    """Dotted path in the contract, such as `target` or `slices.night/accuracy`."""
    standing: Standing
    promised: str
    found: str
    """In numbers, with the step if there is one."""
    remedy: str = ""
    """What would settle it; empty if it is held."""


@dataclass(frozen=True, slots=True)
class ContractVerdict:
    """All clauses of one contract."""

    clauses: tuple[Clause, ...]

    @property
    def standing(self) -> Standing:
        """Broken if any clause is broken; held if all are held."""
        return worst(clause.standing for clause in self.clauses)

    @property
    def claim(self) -> str:
        """The verdict in one sentence."""
        broken = [clause.name for clause in self.clauses if clause.standing is Standing.BROKEN]
        if broken:
            return f"the contract is broken: {', '.join(broken)}"
        unknown = [clause.name for clause in self.clauses if clause.standing is Standing.NOT_SHOWN]
        if unknown:
            return f"not enough evidence for the contract: {', '.join(unknown)}"
        return f"the contract is held: {len(self.clauses)} of {len(self.clauses)} clauses"

    def as_json(self) -> dict[str, object]:
        """Plain data."""
        return {
            "standing": self.standing.value,
            "claim": self.claim,
            "clauses": [
                {
                    "name": clause.name,
                    "standing": clause.standing.value,
                    "promised": clause.promised,
                    "found": clause.found,
                    "remedy": clause.remedy,
                }
                for clause in self.clauses
            ],
        }


def worst(standings: Iterable[Standing]) -> Standing:
    """The standing of a whole from those of its parts."""
    found = set(standings)
    for standing in (Standing.BROKEN, Standing.NOT_SHOWN):
        if standing in found:
            return standing
    return Standing.HELD
