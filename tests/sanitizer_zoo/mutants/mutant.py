"""One mutated script and what it is expected to be found to be."""

from __future__ import annotations

import ast
from dataclasses import dataclass

from sanitizer_zoo.mutants.roles import Script


@dataclass(frozen=True)
class Mutant:
    """One edited script and what it should be found to be."""

    script: str
    operator: str
    line: int
    what: str
    kinds: tuple[str, ...]
    text: str

    @property
    def name(self) -> str:
        """Unique in the set: script, line, operator, what was edited."""
        return f"{self.script}:{self.line} {self.operator} {self.what}"


def mutant_of(
    script: Script, operator: str, node: ast.AST, kinds: tuple[str, ...], text: str
) -> Mutant:
    """The mutant made by an edit at a node; it is named by the first line of what was edited."""
    statement = script.statement_of(node)
    what = script.segment(node).splitlines()[0]
    return Mutant(script.name, operator, statement.lineno, what, kinds, text)
