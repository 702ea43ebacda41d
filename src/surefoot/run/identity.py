"""What tells the experiments of two runs apart beside their settings and data: model, task, code.

Each is recorded as a digest, with a few words for people. Reads; changes nothing.
"""

from __future__ import annotations

import hashlib
import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final
from weakref import WeakKeyDictionary

from torch import nn

from surefoot.assembly.run_parts import Material
from surefoot.data.fingerprint import hash_value
from surefoot.parallel.digests import digest_of_weights
from surefoot.tasks.task import FunctionTask

NOT_OWN: Final = ("torch", "surefoot", "builtins")
"""Packages whose code is known by their versions, which the record holds."""
MOST_NAMED: Final = 4
UNKNOWN: Final = "unknown"
FRESH: Final = "weights that no run of this process has trained"

_trained: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()


def identity_of(material: Material, *, resuming: bool) -> dict[str, Any]:
    """Model, task and own code of a run, for its record.

    Args:
        material: before the model is laid out over devices.
        resuming: whether a checkpoint will replace the weights; they are not looked at then.
    """
    model, task = material.model, material.task
    found: dict[str, Any] = {
        "model": {
            "class": type(model).__qualname__,
            "modules": _counted(model),
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
            "structure": _digest(_structure(model)),
            "code": _code_of(type(module) for module in model.modules()),
        },
        "task": {"class": type(task).__qualname__, "digest": _task_digest(task)},
    }
    if not resuming:
        found["begins_from"] = _trained.get(model, FRESH)
        found["initial_weights"] = digest_of_weights(model)
    return found


def remember_trained(model: nn.Module, run: str, step: int) -> None:
    """From now on a run of this model object begins from weights that were trained."""
    if step:
        _trained[model] = f"weights of {run} at step {step}"


def begins_trained(identity: Mapping[str, Any]) -> str:
    """What is to be said of a run that begins from trained weights; empty for nothing."""
    begins = identity.get("begins_from", FRESH)
    if begins == FRESH:
        return ""
    return (
        f"this run begins from trained weights ({begins}): the model object was trained before. "
        "To begin anew, make the model again; to go on with that run, fit(resume=RUN)"
    )


def _counted(model: nn.Module) -> str:
    """Classes of the modules without children, with their numbers."""
    kinds = Counter(type(m).__name__ for m in model.modules() if not any(m.children()))
    shown = [f"{count} {name}" for name, count in kinds.most_common(MOST_NAMED)]
    more = len(kinds) - MOST_NAMED
    return ", ".join(shown) + (f", {more} more kinds" if more > 0 else "")


def _structure(model: nn.Module) -> Iterator[str]:
    for name, module in model.named_modules():
        kind = type(module)
        # Of a module with children the representation would hold theirs.
        yield f"{name}: {kind.__module__}.{kind.__qualname__}({module.extra_repr()})"
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        yield f"{name}: {tensor.dtype} {tuple(tensor.shape)} {tensor.requires_grad}"


def _task_digest(task: Any) -> str:
    if isinstance(task, FunctionTask):
        functions: list[Any] = [task.loss_fn, task.weight_fn, *task.metrics.values()]
        names = [task.unit, *task.deciding_metric, *task.metrics]
        return _digest([*names, *map(_source, functions)])
    inner = getattr(task, "task", None)
    if inner is not None:
        further = getattr(task, "metrics", {})
        return _digest([_task_digest(inner), *further, *map(_source, further.values())])
    return _digest([hash_value(task), _code_of([type(task)])])


def _code_of(classes: Iterable[type]) -> str:
    """Digest of the code of a person's own classes; empty where there are none."""
    own = {kind for kind in classes if kind.__module__.partition(".")[0] not in NOT_OWN}
    texts = sorted(
        f"{kind.__qualname__}.{name}: {_source(method)}"
        for kind in own
        for name, method in vars(kind).items()
        # Method by method: a class is looked up by its name, and a name may have been given twice.
        if inspect.isfunction(method)
    )
    return _digest(texts) if own else ""


def _source(of: Callable[..., Any]) -> str:
    """Its source text where that can be had; otherwise the compiled code, or its name."""
    try:
        return inspect.getsource(of)
    except (OSError, TypeError):
        code = getattr(of, "__code__", None)
        if code is None:
            return f"{UNKNOWN}: {getattr(of, '__qualname__', type(of).__qualname__)}"
        constants = [value for value in code.co_consts if isinstance(value, int | float | str)]
        return f"{code.co_code.hex()} {code.co_names} {constants}"


def _digest(texts: Iterable[str]) -> str:
    found = hashlib.blake2b(digest_size=8)
    for text in texts:
        found.update(f"{len(text)}:{text};".encode("utf-8", "surrogateescape"))
    return found.hexdigest()
