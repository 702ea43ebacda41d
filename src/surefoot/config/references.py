"""Replaces references `${section.key}` in a recipe by the values that they refer to.

A recipe may come from somebody else: it reads no environment, evaluates nothing, and the size of
its expansion is bounded.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from surefoot.config.yaml_text import MAX_CHARACTERS
from surefoot.core.errors import Violation

MAX_VALUES = 100_000
MAX_CHAIN = 50

_REFERENCE = re.compile(r"\$\{([A-Za-z_]\w*(?:\.\w+)*)\}", re.ASCII)


def follow_references(given: Mapping[str, Any]) -> tuple[dict[str, Any], list[Violation]]:
    """The same tree with every reference followed, and the references that cannot be.

    A text that is one reference becomes the value that it refers to, of whatever type; inside a
    longer text the value is written out. What cannot be followed becomes None.

    >>> follow_references({"a": 3, "b": "${a}", "c": "x${b}"})
    ({'a': 3, 'b': 3, 'c': 'x3'}, [])
    """
    found: list[Violation] = []
    references = _References(given)

    def followed(text: str, path: str) -> Any:
        try:
            return references.follow(text, ())
        except _NotFollowed as error:
            found.append(Violation(path, "", f"{text!r}{error.rule}", error.remedy))
            return None

    return _with_texts(given, "", followed), found


class _NotFollowed(Exception):
    """A reference leads nowhere; the rule is the end of a sentence that begins with the text."""

    def __init__(self, rule: str, remedy: str) -> None:
        super().__init__(rule)
        self.rule, self.remedy = rule, remedy


_NOT_GIVEN = (
    " refers to a key that is not given, or to itself",
    "refer to a key that the recipe sets",
)
_NOT_ALLOWED = (
    ": only ${section.key} is allowed inside a value",
    "a recipe reads no environment and runs no resolver; give the value with --set",
)
_TOO_LARGE = (
    " leads to too much, as do others before it",
    f"references lead to at most {MAX_VALUES:,} values of {MAX_CHARACTERS:,} characters in all, "
    f"and to at most {MAX_CHAIN} other references in a row",
)


class _References:
    """Follows references within one tree, and counts the values that they expand to."""

    def __init__(self, tree: Mapping[str, Any]) -> None:
        self.tree = tree
        self.num_values = 0
        self.num_characters = 0

    def follow(self, text: str, within: tuple[str, ...]) -> Any:
        """The value of a text; `within` are the paths that led to it."""
        if "${" in _REFERENCE.sub("", text) or "\\" in text:
            raise _NotFollowed(*(_NOT_GIVEN if within else _NOT_ALLOWED))
        if match := _REFERENCE.fullmatch(text):
            return self._value_at(match[1], within)

        def written(match: re.Match[str]) -> str:
            part = str(self._value_at(match[1], within))
            self._count(part)
            return part

        return _REFERENCE.sub(written, text)

    def _value_at(self, path: str, within: tuple[str, ...]) -> Any:
        if path in within:
            raise _NotFollowed(*_NOT_GIVEN)
        if len(within) == MAX_CHAIN:
            raise _NotFollowed(*_TOO_LARGE)
        within = (*within, path)

        def followed(text: str, path: str) -> Any:
            return self.follow(text, within)

        value: Any = self.tree
        for key in path.split("."):
            if isinstance(value, str) and "${" in value:
                value = self.follow(value, within)
            value = _entry(value, key)
        return _with_texts(value, path, followed, self._count)

    def _count(self, value: Any) -> None:
        self.num_values += 1
        self.num_characters += len(value) if isinstance(value, str) else 0
        if self.num_values > MAX_VALUES or self.num_characters > MAX_CHARACTERS:
            raise _NotFollowed(*_TOO_LARGE)


def _entry(value: Any, key: str) -> Any:
    if isinstance(value, Mapping) and key in value:
        return value[key]
    if isinstance(value, list | tuple) and key.isdecimal() and int(key) < len(value):
        return value[int(key)]
    raise _NotFollowed(*_NOT_GIVEN)


def _with_texts(
    value: Any,
    path: str,
    followed: Callable[[str, str], Any],
    visit: Callable[[Any], None] = lambda value: None,
) -> Any:
    """The value with each text that holds a reference replaced by `followed(text, path)`."""
    visit(value)
    if isinstance(value, Mapping):
        return {
            key: _with_texts(inner, f"{path}.{key}" if path else str(key), followed, visit)
            for key, inner in value.items()
        }
    if isinstance(value, list | tuple):
        inside = [
            _with_texts(inner, f"{path}.{index}", followed, visit)
            for index, inner in enumerate(value)
        ]
        return tuple(inside) if isinstance(value, tuple) else inside
    if isinstance(value, str) and "${" in value:
        return followed(value, path)
    return value
