"""The text of one script with its syntax tree, and the edits that mutations are made of.

Every edit returns new text; nothing here knows what an edit means for a training loop.
"""

from __future__ import annotations

import ast
import itertools
import textwrap
from collections.abc import Iterator
from functools import cached_property


class Source:
    """One script: lines, syntax tree, and for each node what it stands in."""

    def __init__(self, name: str, text: str) -> None:
        self.name, self.text = name, text
        self.lines = text.splitlines()
        self.tree = ast.parse(text)
        self.parents: dict[ast.AST, ast.AST] = {}
        for node in ast.walk(self.tree):
            for child in ast.iter_child_nodes(node):
                self.parents[child] = node

    def segment(self, node: ast.AST) -> str:
        """The text of a node."""
        start, end = self._span(node)
        return self.text[start:end]

    def nodes(self, kind: type[ast.AST]) -> Iterator[ast.AST]:
        """All nodes of one kind, from top to bottom."""
        found = [node for node in ast.walk(self.tree) if isinstance(node, kind)]
        yield from sorted(found, key=lambda node: (node.lineno, node.col_offset))  # type: ignore[attr-defined]

    @cached_property
    def statements(self) -> list[ast.stmt]:
        """All statements from top to bottom."""
        found = [node for node in ast.walk(self.tree) if isinstance(node, ast.stmt)]
        return sorted(found, key=lambda node: (node.lineno, node.col_offset))

    def statement_of(self, node: ast.AST) -> ast.stmt:
        """The innermost statement around a node."""
        while not isinstance(node, ast.stmt):
            node = self.parents[node]
        return node

    def around(self, node: ast.AST) -> Iterator[ast.AST]:
        """What a node stands in, from the inside out."""
        while node in self.parents:
            node = self.parents[node]
            yield node

    def function_of(self, node: ast.AST) -> ast.FunctionDef | None:
        """The innermost function around a node."""
        return next((n for n in self.around(node) if isinstance(n, ast.FunctionDef)), None)

    def block_of(self, statement: ast.stmt) -> list[ast.stmt]:
        """The list of statements that a statement is one of."""
        parent = self.parents[statement]
        for field in ("body", "orelse", "finalbody"):
            block = getattr(parent, field, [])
            if isinstance(block, list) and statement in block:
                return block
        raise ValueError(f"line {statement.lineno} of {self.name} is in no block")

    # Edits of a part of a line.

    def replaced(self, node: ast.AST, text: str) -> str:
        """The script with other text in a node's place."""
        return self.spliced([(node, text)])

    def spliced(self, replacements: list[tuple[ast.AST, str]]) -> str:
        """The script with several nodes replaced; none may lie within another."""
        text = self.text
        for node, new in sorted(replacements, key=lambda pair: self._span(pair[0]), reverse=True):
            start, end = self._span(node)
            text = text[:start] + new + text[end:]
        return text

    def without_keyword(self, call: ast.Call, name: str) -> str:
        """The script with one keyword argument of a call left out."""
        return self.replaced(call, _unparsed(call, keyword=name))

    def without_entry(self, mapping: ast.Dict, key: str) -> str:
        """The script with one entry of a dict display left out."""
        kept = [
            (k, v)
            for k, v in zip(mapping.keys, mapping.values, strict=True)
            if not (isinstance(k, ast.Constant) and k.value == key)
        ]
        return self.replaced(
            mapping, ast.unparse(ast.Dict([k for k, _ in kept], [v for _, v in kept]))
        )

    # Edits of whole statements.

    def dropped(self, statement: ast.stmt) -> str:
        """The script without a statement."""
        return self.moved(statement, None)

    def doubled(self, statement: ast.stmt) -> str:
        """The script with a statement twice in a row."""
        return self.copied(statement, statement, "after")

    def copied(self, statement: ast.stmt, other: ast.stmt, where: str) -> str:
        """The script with a copy of a statement `before` or `after` another, or `inside` it."""
        lines = self.lines[:]
        row, indent = self._place(other, where)
        lines[row:row] = self._taken(statement, indent)
        return "\n".join(lines) + "\n"

    def moved(self, statement: ast.stmt, other: ast.stmt | None, where: str = "after") -> str:
        """The script with a statement moved beside or inside another, or away."""
        first, last = _rows(statement)
        lines = self.lines[:]
        stays: list[str] = []
        if len(self.block_of(statement)) == 1:
            stays = [" " * statement.col_offset + "pass"]
        taken: list[str] = []
        row = first
        if other is not None:
            row, indent = self._place(other, where)
            taken = self._taken(statement, indent)
        if row > first:
            lines[row:row] = taken
            lines[first:last] = stays
        else:
            lines[first:last] = stays
            lines[row:row] = taken
        return "\n".join(lines) + "\n"

    def unwrapped(self, statement: ast.With) -> str:
        """The script with a `with` gone and its body in its place."""
        first, last = _rows(statement)
        inner = self.lines[statement.body[0].lineno - 1 : last]
        body = textwrap.indent(textwrap.dedent("\n".join(inner)), " " * statement.col_offset)
        lines = [*self.lines[:first], *body.splitlines(), *self.lines[last:]]
        return "\n".join(lines) + "\n"

    def without_decorator(self, function: ast.FunctionDef, decorator: ast.expr) -> str:
        """The script with a decorator of a function left out."""
        rows = range(decorator.lineno - 1, decorator.end_lineno or decorator.lineno)
        kept = [line for row, line in enumerate(self.lines) if row not in rows]
        return "\n".join(kept) + "\n"

    def _taken(self, statement: ast.stmt, indent: int) -> list[str]:
        first, last = _rows(statement)
        text = textwrap.dedent("\n".join(self.lines[first:last]))
        return textwrap.indent(text, " " * indent).splitlines()

    def _place(self, other: ast.stmt, where: str) -> tuple[int, int]:
        """Row to insert at, and the indent there."""
        first, last = _rows(other)
        if where == "inside":
            body = other.body  # type: ignore[attr-defined]
            return _rows(body[0])[0], body[0].col_offset
        if where == "at its end":
            body = other.body  # type: ignore[attr-defined]
            return _rows(body[-1])[1], body[0].col_offset
        return (first if where == "before" else last), other.col_offset

    def _span(self, node: ast.AST) -> tuple[int, int]:
        assert isinstance(node, (ast.expr, ast.stmt, ast.keyword))
        end_line, end_column = node.end_lineno, node.end_col_offset
        assert end_line is not None and end_column is not None
        start = self._starts[node.lineno - 1] + node.col_offset
        return start, self._starts[end_line - 1] + end_column

    @cached_property
    def _starts(self) -> list[int]:
        """Where each line begins; columns count characters, as the scripts are plain ASCII."""
        return [0, *itertools.accumulate(len(line) + 1 for line in self.lines)]


def _rows(statement: ast.stmt) -> tuple[int, int]:
    """First row, counted from 0 and with decorators, and the row after the last."""
    decorators = getattr(statement, "decorator_list", [])
    first = min([statement.lineno, *(d.lineno for d in decorators)]) - 1
    return first, statement.end_lineno or statement.lineno


def _unparsed(call: ast.Call, keyword: str) -> str:
    kept = [k for k in call.keywords if k.arg != keyword]
    return ast.unparse(ast.Call(call.func, call.args, kept))
