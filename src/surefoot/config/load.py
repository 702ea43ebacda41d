"""From a recipe's text and overrides to a checked `Recipe` that knows where each value came from.

Reads the recipe file and nothing else; imports and runs nothing that it names.
"""

from __future__ import annotations

import difflib
import importlib.resources
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Generic, TypeVar, cast

import xxhash
from pydantic import TypeAdapter, ValidationError

from surefoot.config.invalid import violations_of
from surefoot.config.references import follow_references
from surefoot.config.rules import broken_rules
from surefoot.config.sections import Recipe, Section, Settings
from surefoot.config.yaml_text import MAX_CHARACTERS, read_value, read_yaml, write_yaml
from surefoot.core.doors import GIVEN
from surefoot.core.errors import ConfigError, RequestError, Violation

DEFAULT = "default"
OVERRIDE = "override"

_FIRST = ("name", "model", "data", "task")
"""Sections that are written first, for readers."""

C = TypeVar("C", Recipe, Settings)


@dataclass(frozen=True)
class Resolved(Generic[C]):
    """A checked configuration and the origin of each value."""

    config: C
    origins: Mapping[str, str]
    """Dotted path of each value to `FILE:LINE`, `override`, `default`, or `argument`."""
    dropped: Mapping[str, str] = field(default_factory=dict)
    """Values that the file gave for a kind that an override replaced: dotted path to origin."""

    @property
    def recipe(self) -> C:
        """The configuration."""
        return self.config

    @property
    def settings(self) -> Settings:
        """How to train, of a recipe as of settings."""
        return self.config.settings

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON and YAML: counts as text, every value present."""
        plain: dict[str, Any] = self.config.model_dump(mode="json")
        first = {key: plain[key] for key in _FIRST if key in plain}
        return first | plain

    @property
    def digest(self) -> str:
        """Hash of all values, whatever their origin."""
        text = json.dumps(self.as_dict(), sort_keys=True)
        return xxhash.xxh3_128_hexdigest(text.encode())

    def as_yaml(self) -> str:
        """YAML that loads as the same configuration, with each value's origin as a comment."""
        return write_yaml(self.as_dict(), self.origins)


@dataclass(frozen=True, slots=True)
class Difference:
    """One value that differs between two configurations."""

    path: str
    before: object
    after: object

    def __str__(self) -> str:
        return f"{self.path}: {self.before!r} -> {self.after!r}"


ABSENT = "(absent)"


def differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[Difference]:
    """Differences between two `as_dict()`, by dotted path; a list counts as one value."""
    old, new = dict(_leaves(before)), dict(_leaves(after))
    return [
        Difference(path, old.get(path, ABSENT), new.get(path, ABSENT))
        for path in dict.fromkeys((*old, *new))
        if path not in old or path not in new or old[path] != new[path]
    ]


def recipe_names() -> tuple[str, ...]:
    """Names of the recipes that are part of Surefoot."""
    folder = importlib.resources.files("surefoot") / "recipes"
    if not folder.is_dir():
        return ()
    return tuple(
        sorted(f.name.removesuffix(".yaml") for f in folder.iterdir() if f.name.endswith(".yaml"))
    )


def load_recipe(source: str | Path, overrides: Sequence[str] = ()) -> Resolved[Recipe]:
    """Loads and checks a recipe.

    Args:
        source: path of a YAML file, or the name of a recipe that is part of Surefoot.
        overrides: `section.key=value`, the value in YAML. One that changes the `kind` of a section
            resets the section: values in the file for another kind are dropped.

    Raises:
        RequestError: the recipe does not exist.
        ConfigError: with all violations.

    >>> load_recipe("diabetes-mlp", ["train.micro_batch=16"]).config.train.micro_batch
    16
    """
    text, name = _read(source)
    given, lines = read_yaml(text, name)
    origins = {path: f"{name}:{line}" for path, line in lines.items()}
    return _resolve(Recipe, given, origins, overrides, DEFAULT)


def resolve_settings(
    settings: Mapping[str, Any] | Settings,
    overrides: Sequence[str] = (),
    given: Mapping[str, str] = MappingProxyType({}),
) -> Resolved[Settings]:
    """Checks settings given in Python, as `load_recipe` checks a file.

    Args:
        given: dotted path of each section whose part was handed in, with the part's name.
    """
    plain = _plain(settings)
    for path, name in given.items():
        _name_given(plain, path, name)
    return _resolve(Settings, plain, {}, overrides, "argument")


def resolve_recipe(
    recipe: Mapping[str, Any] | Recipe, overrides: Sequence[str] = ()
) -> Resolved[Recipe]:
    """Checks a recipe given in Python, as `load_recipe` checks a file."""
    return _resolve(Recipe, _plain(recipe), {}, overrides, "argument")


def _name_given(plain: dict[str, Any], path: str, name: str) -> None:
    """Says in the section at `path` that its part was handed in.

    Raises:
        RequestError: the section names a part itself.
    """
    *around, key = path.split(".")
    node = plain
    for step in around:
        node = node.setdefault(step, {})
    section = node.get(key, {})
    if not isinstance(section, dict):
        return  # What is no section is refused with all else.
    if section.get("kind", GIVEN) != GIVEN:
        raise RequestError(
            f"{key}={name} is given, and the settings have {path}.kind={section['kind']}",
            where=f"{path}.kind",
            rule="a run has one of each part",
            remedy=f"leave one of them out; without {path}.kind the settings hold the numbers for "
            "the part that is given",
        )
    node[key] = {**section, "kind": GIVEN, "target": name}


def _plain(given: Mapping[str, Any] | Section) -> dict[str, Any]:
    if not isinstance(given, (Mapping, Section)):
        raise RequestError(
            f"settings are a mapping or Settings, not {type(given).__name__}",
            rule="settings have sections",
            remedy="write for example {'train': {'horizon': '100 steps', 'micro_batch': 8}}",
        )
    plain: dict[str, Any] = _given(given)
    return plain


def _given(value: Any) -> Any:
    """The explicitly given values as plain containers; the kind of a section always counts."""
    if isinstance(value, Section):
        named = value.model_fields_set | ({"kind"} & set(type(value).model_fields))
        return {name: _given(getattr(value, name)) for name in named}
    if isinstance(value, Mapping):
        return {key: _given(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_given(inner) for inner in value]
    return value


def _read(source: str | Path) -> tuple[str, str]:
    path = Path(source)
    if isinstance(source, str) and source in recipe_names():
        file = importlib.resources.files("surefoot") / "recipes" / f"{source}.yaml"
        return file.read_text(encoding="utf-8"), f"{source}.yaml"
    try:
        with path.open(encoding="utf-8") as stream:
            return stream.read(MAX_CHARACTERS + 1), path.name
    except UnicodeDecodeError:
        raise RequestError(
            f"the recipe {path} is not UTF-8 text", rule="a recipe is YAML in UTF-8"
        ) from None
    except OSError as error:
        near = difflib.get_close_matches(path.stem, recipe_names(), n=1)
        meant = f"did you mean {near[0]}? " if near else ""
        raise RequestError(
            f"cannot read the recipe {str(source)!r}: {error.strerror}",
            rule="a recipe is a YAML file or the name of one that comes with Surefoot",
            remedy=f"{meant}give a path, or one of: {', '.join(recipe_names())}",
        ) from None


def _resolve(
    model: type[C],
    given: dict[str, Any],
    origins: dict[str, str],
    overrides: Sequence[str],
    unnamed: str,
) -> Resolved[C]:
    """`unnamed` is the origin of given values that `origins` does not list."""
    for path, _ in _leaves(given):
        origins.setdefault(path, unnamed)
    found, assignments = _read_overrides(overrides)
    dropped = _restart_sections(given, origins, assignments)
    for keys, value in assignments:
        found += _assign(given, origins, keys, value)
    _name_default_kinds(model, given)
    given, unfollowed = follow_references(given)
    found += unfollowed
    try:
        config = model.model_validate(given)
    except ValidationError as error:
        # A reference that cannot be followed leaves no value to judge.
        known = {violation.path for violation in unfollowed}
        found += [v for v in violations_of(error, given, model) if v.path not in known]
        sections = _valid_sections(model, given)
    else:
        sections = {name: getattr(config, name) for name in model.model_fields}
    violations = [replace(v, origin=v.origin or _origin(v.path, origins, unnamed)) for v in found]
    violations += [replace(v, origin=origins.get(v.path, DEFAULT)) for v in broken_rules(sections)]
    if violations:
        raise ConfigError(violations)
    resolved = {
        path: origins.get(path, DEFAULT) for path, _ in _leaves(config.model_dump(mode="json"))
    }
    return Resolved(config, resolved, dropped)


Assignment = tuple[list[str], Any]

_ASSIGNMENT = re.compile(r"(?P<path>[A-Za-z_]\w*(?:\.[\w-]+)*)=(?P<value>.*)", re.DOTALL)


def _read_overrides(overrides: Sequence[str]) -> tuple[list[Violation], list[Assignment]]:
    found: list[Violation] = []
    assignments: list[Assignment] = []
    for text in overrides:
        match = _ASSIGNMENT.fullmatch(text.strip())
        if match is None:
            rule = f"{text!r} is no assignment"
            found.append(Violation("", OVERRIDE, rule, "write section.key=value"))
            continue
        try:
            assignments.append((match["path"].split("."), read_value(match["value"], OVERRIDE)))
        except ConfigError as error:
            found += [replace(v, path=match["path"], origin=OVERRIDE) for v in error.violations]
    return found, assignments


def _restart_sections(
    given: dict[str, Any], origins: dict[str, str], assignments: Sequence[Assignment]
) -> dict[str, str]:
    """Empty each section whose kind an override changes: its numbers meant something else."""
    dropped: dict[str, str] = {}
    kinds = {keys[0]: value for keys, value in assignments if keys[1:] == ["kind"]}
    for name, kind in kinds.items():
        section = given.get(name)
        if not isinstance(section, dict) or section.get("kind", kind) == kind:
            continue
        for path, _ in _leaves(section, name):
            dropped[path] = origins[path]
        for path in [path for path in origins if path == name or path.startswith(f"{name}.")]:
            del origins[path]
        given[name] = {}
    return dropped


def _assign(
    given: dict[str, Any], origins: dict[str, str], keys: Sequence[str], value: Any
) -> list[Violation]:
    node: Any = given
    path = ".".join(keys)
    for depth, key in enumerate(keys):
        last = depth == len(keys) - 1
        if isinstance(node, list):
            if not key.isdecimal() or int(key) >= len(node):
                rule = f"{'.'.join(keys[:depth])} is a list of {len(node)}, it has no {key!r}"
                return [Violation(path, OVERRIDE, rule)]
            index: Any = int(key)
        elif isinstance(node, dict):
            index = key
            if not last:
                node.setdefault(key, {})
        else:
            return [Violation(path, OVERRIDE, f"{'.'.join(keys[:depth])} is no section of keys")]
        if last:
            node[index] = value
        else:
            node = node[index]
    for old in [old for old in origins if old == path or old.startswith(f"{path}.")]:
        del origins[old]
    origins[path] = OVERRIDE
    origins.update({f"{path}.{inner}": OVERRIDE for inner, _ in _leaves(value)})
    return []


def _name_default_kinds(model: type[Section], given: dict[str, Any]) -> None:
    """A section that is optional as a whole has a kind by default, and so when it has keys only."""
    for name, info in model.model_fields.items():
        section = given.get(name)
        if isinstance(section, dict) and hasattr(info.default, "kind"):
            section.setdefault("kind", info.default.kind)


def _valid_sections(model: type[Section], given: Mapping[str, Any]) -> dict[str, Any]:
    """The sections that are right in themselves: the rules across them can be checked too."""
    sections: dict[str, Any] = {}
    for name, info in model.model_fields.items():
        if name not in given:
            if not info.is_required():
                sections[name] = info.default
            continue
        try:
            whole: TypeAdapter[Any] = TypeAdapter(cast(Any, Annotated[info.annotation, info]))
            sections[name] = whole.validate_python(given[name])
        except ValidationError:
            continue
    return sections


def _origin(path: str, origins: Mapping[str, str], unnamed: str) -> str:
    """Origin of the value, or of the first one inside it, or of the nearest section around it."""
    while path:
        if path in origins:
            return origins[path]
        inside = (origin for inner, origin in origins.items() if inner.startswith(f"{path}."))
        if origin := next(inside, ""):
            return origin
        path = path.rpartition(".")[0]
    return origins.get("", unnamed)


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted path and value of everything that is no mapping, and of empty mappings."""
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from _leaves(inner, f"{path}.{key}" if path else str(key))
    elif path:
        yield path, value
