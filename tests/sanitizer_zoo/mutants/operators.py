"""All operators in the order of their use, and every mutation that they make of a script."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from sanitizer_zoo.mutants import expressions, statements
from sanitizer_zoo.mutants.mutant import Mutant
from sanitizer_zoo.mutants.roles import Script

OPERATORS: tuple[Callable[[Script], Iterator[Mutant]], ...] = (
    statements.drop,
    statements.double,
    statements.move,
    statements.move_out,
    statements.move_construction,
    statements.unwrap_no_grad,
    expressions.drop_method,
    expressions.drop_call,
    expressions.drop_keyword,
    expressions.flip,
    expressions.sibling,
    expressions.drop_operand,
    expressions.arithmetic,
    expressions.slices,
    expressions.names,
)


def mutants_of(script: Script) -> list[Mutant]:
    """Every mutation of one script, each text once."""
    seen, found = {script.text}, []
    for operator in OPERATORS:
        for mutant in operator(script):
            if mutant.text not in seen:
                seen.add(mutant.text)
                found.append(mutant)
    return found
