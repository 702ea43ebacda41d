"""Converts schema errors into violations that name the key, the rule and a remedy.

Decides nothing: the sections and `rules` define what is valid.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from surefoot.config.sections.parts import PART_TAG, PartSection
from surefoot.core.errors import Violation

_FOREIGN_NAMES = {
    "accumulate_grad_batches": "train.accumulation",
    "amp": "precision.dtype",
    "batch_size": "train.micro_batch",
    "block_size": "data.sequence_length",
    "context_length": "data.sequence_length",
    "d_ff": "model.feedforward_dim",
    "d_model": "model.embedding_dim",
    "epochs": "train.horizon",
    "fp16": "precision.dtype",
    "bf16": "precision.dtype",
    "grad_accum": "train.accumulation",
    "grad_clip": "train.clip_norm",
    "gradient_accumulation_steps": "train.accumulation",
    "gradient_clip_val": "train.clip_norm",
    "hidden_size": "model.embedding_dim",
    "label_smoothing_factor": "task.label_smoothing",
    "learning_rate": "optimizer.lr",
    "lr_scheduler_type": "schedule.kind",
    "max_epochs": "train.horizon",
    "max_grad_norm": "train.clip_norm",
    "max_iters": "train.horizon",
    "max_steps": "train.horizon",
    "mixed_precision": "precision.dtype",
    "n_embd": "model.embedding_dim",
    "n_head": "model.num_heads",
    "n_layer": "model.num_layers",
    "num_epochs": "train.horizon",
    "num_train_epochs": "train.horizon",
    "num_workers": "loader.workers",
    "per_device_train_batch_size": "train.micro_batch",
    "prefetch_factor": "loader.prefetch",
    "save_steps": "checkpoint.every",
    "save_total_limit": "checkpoint.keep",
    "scheduler": "schedule",
    "eval_steps": "evaluate.every",
    "vocab_size": "data.vocabulary_size",
    "warmup_ratio": "schedule.warmup",
    "warmup_steps": "schedule.warmup",
    "wd": "optimizer.weight_decay",
}
"""Keys of other trainers, and ours for the same thing."""


def violations_of(
    error: ValidationError, given: Mapping[str, Any], model: type[BaseModel]
) -> list[Violation]:
    """Violations, without origins, of one failed validation of `given`."""
    found = [
        _explained(dict(detail), _keys(detail["loc"], given), given, model)
        for detail in error.errors(include_url=False)
    ]
    return list(dict.fromkeys(found))


def _keys(location: Iterable[str | int], given: Mapping[str, Any]) -> list[str]:
    """The location as keys of the recipe, without the tags of unions."""
    keys: list[str] = []
    node: Any = given
    for part in location:
        if isinstance(node, Mapping) and part not in node and part in (PART_TAG, node.get("kind")):
            continue
        if isinstance(node, Mapping):
            keys.append(str(part))
            node = node.get(part)
        elif isinstance(node, (list, tuple)) and isinstance(part, int) and part < len(node):
            keys.append(str(part))
            node = node[part]
        # Else: the name of a member of a union of plain types.
    return keys


def _explained(
    detail: dict[str, Any], keys: list[str], given: Mapping[str, Any], model: type[BaseModel]
) -> Violation:
    path, context, got = ".".join(keys), detail.get("ctx", {}), detail["input"]
    match detail["type"]:
        case "rule":
            return Violation(path, "", context["rule"], context["remedy"])
        case "extra_forbidden":
            return _unknown_key(keys, given, model)
        case "missing":
            return Violation(path, "", "missing: this key has no default", _to_add(keys, model))
        case "union_tag_not_found":
            kinds = ", ".join(kinds_of(model, keys[0]))
            return Violation(f"{path}.kind", "", "missing", f"add {path}.kind, one of {kinds}")
        case "union_tag_invalid":
            kinds = ", ".join(kinds_of(model, keys[0]))
            rule = f"unknown kind {context['tag']!r}; one of {kinds}"
            if ":" in str(context["tag"]) and "custom" in kinds_of(model, keys[0]):
                own = f"for your own code write kind: custom and target: {context['tag']}"
                return Violation(f"{path}.kind", "", rule, own)
            near = _near(str(context["tag"]), kinds_of(model, keys[0]))
            return Violation(f"{path}.kind", "", rule, near)
        case "literal_error":
            rule = f"must be {context['expected']}, not {got!r}"
            near = _near(str(got), re.findall(r"'([^']*)'", context["expected"]))
            return Violation(path, "", rule, near)
        case "model_type" | "model_attributes_type" | "dict_type":
            return Violation(path, "", f"must be a section of keys, not {got!r}")
    message = detail["msg"].replace("Input should", "must", 1)
    if isinstance(got, str) and _is_number(got):
        return Violation(path, "", f"{message}, not the text {got!r}", "write it without quotes")
    return Violation(path, "", f"{message}, not {got!r}")


def _to_add(keys: list[str], model: type[BaseModel]) -> str:
    """What to add for a missing key; for a section, its required keys."""
    path = ".".join(keys)
    if len(keys) > 1 or keys[0] not in model.model_fields:
        return f"add {path}"
    members = _members(model.model_fields[keys[0]])
    if len(members) == 1:
        required = [n for n, f in members[0].model_fields.items() if f.is_required()]
        return "add " + " and ".join(f"{path}.{name}" for name in required or [""]).rstrip(".")
    if kinds := kinds_of(model, keys[0]):
        return f"add {path}.kind, one of {', '.join(kinds)}"
    return f"add {path}"


def _unknown_key(keys: list[str], given: Mapping[str, Any], model: type[BaseModel]) -> Violation:
    *around, word = keys
    here, path = ".".join(around), ".".join(keys)
    siblings = _fields_at(model, around, given)
    rule = "unknown key"
    if "." in word:
        inner = "".join(f"{{{part!r}: " for part in word.split("."))
        return Violation(path, "", rule, f"sections are nested: {inner}...{'}' * inner.count('{')}")
    if around and isinstance(kind := _at(given, around).get("kind"), str):
        rule = f"unknown key for {here} of kind {kind!r}"
    everywhere = _all_paths(model, given)
    if near := difflib.get_close_matches(word, siblings, n=1, cutoff=0.7):
        meant = ".".join([*around, near[0]])
    elif word in _FOREIGN_NAMES:
        meant = _FOREIGN_NAMES[word]
    elif exact := [other for other in everywhere if other.rpartition(".")[2] == word]:
        meant = " or ".join(exact)
    elif close := difflib.get_close_matches(path, everywhere, n=1, cutoff=0.75):
        meant = close[0]
    else:
        known = "known here: " + ", ".join(siblings) if siblings else ""
        return Violation(path, "", rule, known)
    return Violation(path, "", rule, f"did you mean {meant}?")


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _near(word: str, choices: Iterable[str]) -> str:
    near = difflib.get_close_matches(word, list(choices), n=1, cutoff=0.5)
    return f"did you mean {near[0]!r}?" if near else ""


def _at(given: Mapping[str, Any], keys: list[str]) -> Mapping[str, Any]:
    node: Any = given
    for key in keys:
        node = _child(node, key)
    return node if isinstance(node, Mapping) else {}


def _child(node: Any, key: str) -> Any:
    if isinstance(node, (list, tuple)):
        return node[int(key)]
    return node.get(key) if isinstance(node, Mapping) else None


def _members(field: FieldInfo) -> list[type[BaseModel]]:
    """The sections that a field can hold."""
    found: list[type[BaseModel]] = []
    pending: list[Any] = [field.annotation]
    while pending:
        candidate = pending.pop(0)
        if isinstance(candidate, type) and issubclass(candidate, BaseModel):
            found.append(candidate)
        else:
            pending += [arg for arg in get_args(candidate) if not isinstance(arg, (str, FieldInfo))]
    return found


def _kinds(section: type[BaseModel]) -> tuple[str, ...]:
    """The kinds that one section stands for; of `PartSection`, all that nothing else does."""
    if issubclass(section, PartSection):
        return section.kinds()
    field = section.model_fields.get("kind")
    return tuple(map(str, get_args(field.annotation))) if field else ()


def kinds_of(model: type[BaseModel], key: str) -> tuple[str, ...]:
    """The kinds of the section `key`; empty if it has one form only."""
    found = (kind for member in _members(model.model_fields[key]) for kind in _kinds(member))
    return tuple(dict.fromkeys(found))


def _chosen(field: FieldInfo, node: object) -> type[BaseModel] | None:
    members = _members(field)
    if len(members) == 1:
        return members[0]
    kind = node.get("kind") if isinstance(node, Mapping) else None
    return next((member for member in members if kind in _kinds(member)), None)


def _fields_at(model: type[BaseModel], keys: list[str], given: Mapping[str, Any]) -> list[str]:
    node: Any = given
    current: type[BaseModel] | None = model
    for key in keys:
        if isinstance(node, (list, tuple)):
            node = _child(node, key)
            continue
        if current is None or key not in current.model_fields:
            return []
        node = _child(node, key)
        current = _chosen(current.model_fields[key], node)
    return list(current.model_fields) if current else []


def _all_paths(model: type[BaseModel], given: Mapping[str, Any]) -> list[str]:
    """Dotted paths of all keys that are valid in this recipe, given its kinds."""
    paths = list(model.model_fields)
    for name, field in model.model_fields.items():
        section = _chosen(field, given.get(name, {}))
        if section is None and field.default is not None and isinstance(field.default, BaseModel):
            section = type(field.default)
        paths += [f"{name}.{key}" for key in (section.model_fields if section else ())]
    return paths
