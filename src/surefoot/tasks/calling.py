"""How a batch reaches a model, and how scores come out of what the model returns.

Decided from the signature of `forward` alone: nothing is tried and caught, and no value of a
tensor is looked at. A batch may be

- a tuple or list `(input, ..., target)`: inputs are passed by position, the last entry is the
  target; a single mapping as input is passed by name;
- a mapping, data class or named tuple: entries that `forward` names are passed by name, the target
  is the entry under one of `TARGET_NAMES`. Where there is one input and one parameter that must be
  given, their names need not agree. Other entries stay with the task (see `CallPlan.unused`);
- a tensor: the one input; there is no target.

A `**kwargs` of `forward` receives nothing unless it is all that `forward` declares.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from surefoot.core.batches import TARGET_MASK, TARGET_NAMES
from surefoot.core.errors import DataError, ModelError

TASK_NAMES = frozenset((*TARGET_NAMES, TARGET_MASK))
"""Entries that belong to the task. No model is passed them, so none computes its own loss."""


@dataclass(frozen=True, slots=True)
class Signature:
    """What a `forward` accepts."""

    names: tuple[str, ...]
    """Parameters that can be passed by name, in order."""
    required: tuple[str, ...]
    """Those of them without a default."""
    max_positional: float
    """Most positional arguments; infinite with `*args`."""
    any_name: bool
    """True where `forward` declares nothing but `*args` and `**kwargs`."""


@dataclass(frozen=True, slots=True)
class CallPlan:
    """How one batch is passed to one model."""

    accepted: tuple[str, ...]
    """Names that `forward` accepts."""
    passed: tuple[str, ...]
    """Entries of the batch that reach the model."""
    unused: tuple[str, ...]
    """Entries that reach neither the model nor the task under `TASK_NAMES`."""


_SIGNATURES: WeakKeyDictionary[nn.Module, Signature] = WeakKeyDictionary()


def signature_of(model: nn.Module) -> Signature:
    """Signature of the model's `forward`, seen through the wrappers of `torch.compile` and DDP."""
    known = _SIGNATURES.get(model)
    if known is None:
        known = _read_signature(_unwrapped(model))
        _SIGNATURES[model] = known
    return known


def _unwrapped(model: nn.Module) -> nn.Module:
    inner = getattr(model, "_orig_mod", None)
    if isinstance(inner, nn.Module):
        return _unwrapped(inner)
    inner = getattr(model, "module", None)
    if isinstance(inner, nn.Module) and _read_signature(model).any_name:
        return _unwrapped(inner)
    return model


def _read_signature(model: nn.Module) -> Signature:
    named, required, positional = [], [], 0.0
    any_position = any_name = False
    for parameter in inspect.signature(model.forward).parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            any_name = True
            continue
        if parameter.kind is parameter.VAR_POSITIONAL:
            any_position = True
            continue
        if parameter.kind is not parameter.KEYWORD_ONLY:
            positional += 1
        if parameter.kind is not parameter.POSITIONAL_ONLY:
            named.append(parameter.name)
        if parameter.default is parameter.empty:
            required.append(parameter.name)
    return Signature(
        names=tuple(named),
        required=tuple(required),
        max_positional=float("inf") if any_position else positional,
        any_name=any_name and not named and not positional,
    )


def call_model(model: nn.Module, batch: Any, **settings: Any) -> Any:
    """Pass the inputs of `batch` to `model` and return what it returns.

    Args:
        model: any module; wrapped by `torch.compile` or DDP as well.
        batch: see the head of this module.
        settings: arguments of the task's own, passed by name where `forward` names them.

    Raises:
        ModelError: the model's `forward` cannot take the inputs of this batch.
        DataError: the batch is of a kind that holds no inputs.
    """
    signature = signature_of(model)
    extra = {name: value for name, value in settings.items() if name in signature.names}
    positional, named = _inputs(batch)
    if named is None:
        _check_positional(model, signature, len(positional))
        return model(*positional, **extra)
    arguments = _named_arguments(model, signature, named)
    if isinstance(arguments, dict):
        return model(**(arguments | extra))
    return model(named[arguments], **extra)


def plan_call(model: nn.Module, batch: Any) -> CallPlan:
    """Says how `call_model` would pass `batch`, without calling; for dry runs and records.

    Raises:
        ModelError: as `call_model`.
        DataError: as `call_model`.
    """
    signature = signature_of(model)
    positional, named = _inputs(batch)
    if named is None:
        _check_positional(model, signature, len(positional))
        names = tuple(f"input {place}" for place in range(len(positional)))
        return CallPlan(accepted=signature.names, passed=names, unused=())
    arguments = _named_arguments(model, signature, named)
    passed = tuple(arguments) if isinstance(arguments, dict) else (arguments,)
    unused = tuple(name for name in named if name not in passed and name not in TASK_NAMES)
    return CallPlan(accepted=signature.names, passed=passed, unused=unused)


def named_entries(batch: Any) -> dict[str, Any] | None:
    """Entries of a mapping, data class or named tuple; None for a batch without names.

    Entries that are None count as absent.
    """
    if isinstance(batch, Mapping):
        entries = dict(batch)
    elif is_dataclass(batch) and not isinstance(batch, type):
        entries = {entry.name: getattr(batch, entry.name) for entry in fields(batch)}
    elif isinstance(batch, tuple) and hasattr(batch, "_asdict"):
        entries = batch._asdict()
    else:
        return None
    return {name: value for name, value in entries.items() if value is not None}


def find_target(batch: Any) -> Any | None:
    """Target of a batch, or None where it has none."""
    named = named_entries(batch)
    if named is not None:
        return next((named[name] for name in TARGET_NAMES if name in named), None)
    if isinstance(batch, (tuple, list)) and len(batch) > 1:
        return batch[-1]
    return None


def target_of(batch: Any) -> Tensor:
    """Target of a batch.

    Raises:
        DataError: there is no target, or it is not a tensor.
    """
    target = find_target(batch)
    if isinstance(target, Tensor):
        return target
    found = "no target" if target is None else f"a target that is a {type(target).__name__}"
    raise DataError(
        f"the batch ({_described(batch)}) holds {found}",
        rule=f"the target is a tensor: the last entry of a tuple, or one of {list(TARGET_NAMES)}",
        remedy="rename the entry, or give the target as a tensor",
    )


def target_mask_of(batch: Any) -> Tensor | None:
    """The batch's `target_mask` as bool, or None where every target counts."""
    named = named_entries(batch)
    mask = None if named is None else named.get(TARGET_MASK)
    return mask.bool() if isinstance(mask, Tensor) else None


def logits_of(output: Any) -> Tensor:
    """Scores out of what a model returned.

    A tensor is taken as it is, of a tuple or list the first entry, of a mapping or object the entry
    or attribute `logits`.

    Raises:
        ModelError: no scores are there, or they are a scalar (a loss, most likely).
    """
    if isinstance(output, (tuple, list)) and not hasattr(output, "logits"):
        scores = output[0] if output else None
    elif isinstance(output, Mapping):
        scores = output.get("logits")
    else:
        scores = getattr(output, "logits", output)
    if isinstance(scores, Tensor) and scores.dim() > 0:
        return scores
    if isinstance(scores, Tensor):
        raise ModelError(
            "the model returned a scalar where scores are expected",
            rule="a model returns scores; the task computes the loss",
            remedy="return the scores first, or use FunctionTask for a model with its own loss",
        )
    raise ModelError(
        f"no scores in what the model returned ({_described(output)})",
        rule="a model returns a tensor, a tuple that starts with one, or something with `logits`",
        remedy="return the scores in one of these ways, or use FunctionTask",
    )


def _inputs(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any] | None]:
    """Inputs by position, or entries by name (then the first part is empty)."""
    named = named_entries(batch)
    if named is not None:
        return (), named
    if isinstance(batch, Tensor):
        return (batch,), None
    if isinstance(batch, (tuple, list)) and batch:
        inputs = tuple(batch[:-1]) if len(batch) > 1 else tuple(batch)
        inner = named_entries(inputs[0]) if len(inputs) == 1 else None
        return ((), inner) if inner is not None else (inputs, None)
    raise DataError(
        f"a batch of the kind {_described(batch)} holds no inputs",
        rule="a batch is a tensor, a tuple (inputs..., target), a mapping or a data class",
        remedy="give the loader a collate function that returns one of these",
    )


def _check_positional(model: nn.Module, signature: Signature, count: int) -> None:
    if count > signature.max_positional or len(signature.required) > count:
        raise ModelError(
            f"the batch gives {count} input{'s' if count != 1 else ''} by position; "
            f"{_name(model)}.forward needs {list(signature.required)}",
            rule="a tuple batch is (inputs..., target), and the inputs fill forward's parameters",
            remedy="change the batch or forward, or use FunctionTask to call the model yourself",
        )


def _named_arguments(
    model: nn.Module, signature: Signature, named: Mapping[str, Any]
) -> dict[str, Any] | str:
    """Arguments by name, or the name of the single entry that is the single input."""
    offered = {name: value for name, value in named.items() if name not in TASK_NAMES}
    if signature.any_name:
        return offered
    matched = {name: offered[name] for name in signature.names if name in offered}
    missing = [name for name in signature.required if name not in matched]
    if not missing and matched:
        return matched
    if not matched and len(offered) == 1 and len(signature.required) <= 1:
        return next(iter(offered))
    remedy = "rename the entries, or use FunctionTask to call the model yourself"
    if missing == ["attention_mask"]:
        remedy = (
            "padding to the longest sample gives the batch its mask: "
            "surefoot.DatasetSource(dataset, collate=surefoot.PaddingCollate())"
        )
    raise ModelError(
        f"{_name(model)}.forward needs {list(signature.required)}; the batch has {sorted(offered)}",
        where=f"{_name(model)}.forward accepts {list(signature.names)}",
        rule="entries of a batch reach forward by name; the target is kept for the task",
        remedy=remedy,
    )


def _name(model: nn.Module) -> str:
    return type(_unwrapped(model)).__name__


def _described(value: Any) -> str:
    named = named_entries(value)
    if named is not None:
        return f"{type(value).__name__} with {sorted(named)}"
    if isinstance(value, (tuple, list)):
        return f"{type(value).__name__} of {[type(entry).__name__ for entry in value]}"
    return type(value).__name__
