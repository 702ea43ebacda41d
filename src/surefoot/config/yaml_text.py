"""Reads and writes recipe text: plain YAML data and the line of each value, nothing else.

A recipe is data from somebody else. No tags, so no Python objects; no anchors and aliases, so
nothing that grows when it is read; no include, no evaluation, no environment. `on`, `off`, `yes`,
`no` are words, as in YAML 1.2, and `1e-4` is a number.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

import yaml

from surefoot.core.errors import ConfigError, Violation

MAX_CHARACTERS = 1_000_000
MAX_DEPTH = 30

_TRUE = frozenset({"true", "True", "TRUE"})
_FALSE = frozenset({"false", "False", "FALSE"})
_NULL = frozenset({"", "~", "null", "Null", "NULL"})
_INT = re.compile(r"[-+]?(?:0|[1-9][0-9_]*)")
_FLOAT = re.compile(
    r"[-+]?(?:[0-9][0-9_]*(?:\.[0-9_]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|nan)",
    re.ASCII | re.IGNORECASE,
)


def read_yaml(text: str, name: str) -> tuple[dict[str, Any], dict[str, int]]:
    """Read a mapping; return it and the line (from 1) of each dotted path.

    Raises:
        ConfigError: it is not YAML, not a mapping, repeats a key, or uses a tag, anchor or alias.
    """
    node = _compose(text, name)
    lines: dict[str, int] = {}
    if node is None:
        return {}, lines
    if not isinstance(node, yaml.MappingNode):
        raise _refused(name, 1, "a recipe is a mapping of sections", "start with 'name: ...'")
    value = _value(node, "", name, lines)
    assert isinstance(value, dict)
    return value, lines


def read_value(text: str, name: str) -> Any:
    """Read one value, as the right side of `--set key=value`."""
    node = _compose(text, name)
    return None if node is None else _value(node, "", name, {})


def _compose(text: str, name: str) -> yaml.Node | None:
    if len(text) > MAX_CHARACTERS:
        raise _refused(name, 1, f"a recipe has at most {MAX_CHARACTERS} characters")
    try:
        # BaseLoader resolves nothing: every plain scalar comes out as text, and what it means is
        # decided by `_scalar`.
        depth = 0
        for event in yaml.parse(text, Loader=yaml.BaseLoader):
            _check_event(event, name)
            depth += isinstance(event, yaml.CollectionStartEvent)
            depth -= isinstance(event, yaml.CollectionEndEvent)
            if depth > MAX_DEPTH:
                raise _refused(name, _line(event.start_mark), "nested too deeply")
        return yaml.compose(text, Loader=yaml.BaseLoader)
    except yaml.MarkedYAMLError as error:
        line = _line(error.problem_mark or error.context_mark)
        what = ": ".join(part for part in (error.context, error.problem) if part)
        raise _refused(name, line, f"not YAML: {what}") from None
    except yaml.YAMLError as error:
        raise _refused(name, 1, f"not YAML: {error}") from None


def _check_event(event: Any, name: str) -> None:
    if getattr(event, "anchor", None) is not None:
        raise _refused(
            name,
            _line(event.start_mark),
            "anchors (&), aliases (*) and merge keys (<<) are not allowed",
            "refer to another value with ${section.key}",
        )
    if getattr(event, "tag", None) is not None:
        rule = f"the tag {event.tag!r} is not allowed: a recipe is plain data"
        raise _refused(name, _line(event.start_mark), rule, "leave the tag out")


def _value(node: yaml.Node, path: str, name: str, lines: dict[str, int]) -> Any:
    line = _line(node.start_mark)
    lines.setdefault(path, line)
    if isinstance(node, yaml.MappingNode):
        return _mapping(node, path, name, lines)
    if isinstance(node, yaml.SequenceNode):
        return [
            _value(item, f"{path}.{index}" if path else str(index), name, lines)
            for index, item in enumerate(node.value)
        ]
    assert isinstance(node, yaml.ScalarNode)
    # A quoted text is a text, whatever it looks like.
    return str(node.value) if node.style else _scalar(node.value)


def _mapping(node: yaml.MappingNode, path: str, name: str, lines: dict[str, int]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key_node, value_node in node.value:
        line = _line(key_node.start_mark)
        if not isinstance(key_node, yaml.ScalarNode) or not key_node.value:
            raise _refused(name, line, "a key is a plain word")
        key = key_node.value
        inner = f"{path}.{key}" if path else key
        if key in found:
            raise _refused(name, line, f"the key '{inner}' is there twice (line {lines[inner]})")
        lines[inner] = line
        found[key] = _value(value_node, inner, name, lines)
    return found


def _scalar(text: str) -> str | int | float | bool | None:
    if text in _TRUE:
        return True
    if text in _FALSE:
        return False
    if text in _NULL:
        return None
    if _INT.fullmatch(text) and len(text) < 100:
        return int(text.replace("_", ""))
    if _FLOAT.fullmatch(text) and not re.fullmatch(r"[-+]?0[0-9_]+", text):
        return float(text.replace("_", "").replace(".inf", "inf").replace(".nan", "nan"))
    return text


def _line(mark: Any) -> int:
    return mark.line + 1 if mark else 1


def _refused(name: str, line: int, rule: str, remedy: str = "") -> ConfigError:
    return ConfigError([Violation("", f"{name}:{line}", rule, remedy)])


def write_yaml(config: Mapping[str, Any], origins: Mapping[str, str]) -> str:
    """Text that `read_yaml` reads back as `config`, with the origin of each value beside it."""
    return "\n".join(_lines(config, origins, "", 0)) + "\n"


def _lines(
    config: Mapping[str, Any], origins: Mapping[str, str], path: str, depth: int
) -> Iterator[str]:
    indent = "  " * depth
    # The kind of a section says which other keys there are, so it is read first.
    for key in sorted(config, key=lambda key: key != "kind"):
        value = config[key]
        inner = f"{path}.{key}" if path else key
        if isinstance(value, Mapping) and value and all(map(_is_plain, value)):
            yield f"{indent}{_written(key)}:"
            yield from _lines(value, origins, inner, depth + 1)
        else:
            origin = origins.get(inner, "")
            comment = f"  # {_one_line(origin)}" if origin else ""
            yield f"{indent}{_written(key)}: {_flow(value)}{comment}"


def _one_line(text: str) -> str:
    return "".join(char if char.isprintable() else "?" for char in text)


def _flow(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_written(k)}: {_flow(v)}" for k, v in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(_flow, value)) + "]"
    return _written(value)


_PLAIN = re.compile(r"[A-Za-z0-9_./](?:[A-Za-z0-9_./ -]*[A-Za-z0-9_./-])?")


def _is_plain(text: object) -> bool:
    return isinstance(text, str) and bool(_PLAIN.fullmatch(text)) and _scalar(text) == text


def _written(value: object) -> str:
    if isinstance(value, bool) or value is None:
        return json.dumps(value)
    if isinstance(value, str):
        return value if _is_plain(value) else f'"{"".join(map(_escaped, value))}"'
    return repr(value)


def _escaped(char: str) -> str:
    if char in '"\\':
        return f"\\{char}"
    return char if char.isprintable() else f"\\U{ord(char):08x}"
