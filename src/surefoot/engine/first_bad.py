"""Where an update stopped being finite: its window is run again, with an eye on every module.

Random state, gradients, buffers and weights are afterwards what they were. It is slow and waits for
the device: only an update that has failed already pays for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from surefoot.engine.passes import Pass
from surefoot.engine.window import Window
from surefoot.numerics.determinism import preserved_rng
from surefoot.numerics.loss_scaling import LossScale
from surefoot.parallel.ranks import OneRank, Ranks

MOST_NAMED = 5


@dataclass(frozen=True)
class FirstBad:
    """Finds the first module of a window whose output, or gradient, is not finite.

    Args:
        model: the module whose parts are looked at.
        run_pass: the pass of the training.
        loss_scale: the scale of the training.
        device: whose random state is kept.
        ranks: which look together, each at its own data and layers.
    """

    model: nn.Module
    run_pass: Pass
    loss_scale: LossScale
    device: torch.device
    ranks: Ranks = field(default_factory=OneRank)

    def find(self, window: Window, denominators: Mapping[str, float]) -> dict[str, object]:
        """Runs the window again; every rank calls it alike.

        Returns:
            `weights`: names of weights that are not finite; `forward`: the first module of the
            forward with such an output, and whether its inputs were finite; `backward`: the first
            module of the backward whose output has such a gradient; `gradients`: parameters with
            such a gradient. None or empty where there is none.
        """
        found: dict[str, object] = {
            "weights": _bad_names(self.model.named_parameters()),
            "forward": None,
            "backward": None,
            "gradients": [],
        }
        with (
            preserved_rng(self.device),
            _preserved_tensors(self.model),
            torch.compiler.set_stance("force_eager"),
            _looking_at(self.model, found),
        ):
            try:
                self.run_pass(window.micro_batches, denominators, self.loss_scale)
            except Exception as error:
                found["error"] = f"{type(error).__name__}: {error}"
            found["gradients"] = _bad_names(
                (name, p.grad) for name, p in self.model.named_parameters() if p.grad is not None
            )
        return _of_all(self.ranks.gather("the first that is not finite", found))


def _of_all(of_ranks: Sequence[dict[str, Any]]) -> dict[str, object]:
    """What several ranks have found; the first ones hold the first layers."""
    if len(of_ranks) == 1:
        return of_ranks[0]
    forwards = [found["forward"] for found in of_ranks if found["forward"] is not None]
    backwards = [found["backward"] for found in of_ranks if found["backward"] is not None]
    origins = [forward for forward in forwards if forward["finite_inputs"]]
    errors = [found["error"] for found in of_ranks if "error" in found]
    names = {
        key: list(dict.fromkeys(name for found in of_ranks for name in found[key]))
        for key in ("weights", "gradients")
    }
    return {
        **names,
        "forward": next(iter([*origins, *forwards]), None),
        "backward": backwards[-1] if backwards else None,
        **({"error": errors[0]} if errors else {}),
    }


def described(found: Mapping[str, object]) -> str:
    """What was found, for people."""
    if found["weights"]:
        return f"weights were not finite before: {_listed(found['weights'])}"
    forward: Any = found["forward"]
    if forward is not None:
        whence = "whose inputs were" if forward["finite_inputs"] else "as was its input"
        kind = f"{forward['module']} ({forward['kind']})"
        ending = f", {whence} finite" if forward["finite_inputs"] else f", {whence}"
        return f"the first output that is not finite is that of {kind}{ending}"
    backward: Any = found["backward"]
    if backward is not None:
        kind = f"{backward['module']} ({backward['kind']})"
        return f"the forward is finite; the first such gradient is that of the output of {kind}"
    if found["gradients"]:
        return f"only gradients of weights are not finite: {_listed(found['gradients'])}"
    return "run again, everything is finite: chance (dropout), or a fault of the machine"


@contextmanager
def _preserved_tensors(model: nn.Module) -> Iterator[None]:
    gradients = [(p, p.grad) for p in model.parameters()]
    buffers = [(b, b.detach().clone()) for b in model.buffers()]
    for parameter, _ in gradients:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)


@contextmanager
def _looking_at(model: nn.Module, found: dict[str, object]) -> Iterator[None]:
    def look(name: str, module: nn.Module, inputs: object, output: object) -> None:
        for tensor in _floats(output):
            if found["forward"] is None and not _is_finite(tensor):
                finite = all(map(_is_finite, _floats(inputs)))
                found["forward"] = {**_named(name, module), "finite_inputs": finite}
            if tensor.requires_grad:
                tensor.register_hook(lambda gradient: look_back(name, module, gradient))

    def look_back(name: str, module: nn.Module, gradient: Tensor) -> None:
        if found["backward"] is None and not _is_finite(gradient):
            found["backward"] = _named(name, module)

    handles = [
        module.register_forward_hook(
            lambda module, inputs, output, name=name: look(name, module, inputs, output)
        )
        for name, module in model.named_modules()
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _named(name: str, module: nn.Module) -> dict[str, object]:
    return {"module": name or "the model", "kind": type(module).__name__}


def _floats(value: object) -> list[Tensor]:
    """The floating-point tensors in a value, one level of containers deep."""
    inside: Sequence[object]
    if isinstance(value, Mapping):
        inside = list(value.values())
    elif isinstance(value, tuple | list):
        inside = value
    else:
        inside = [value]
    return [t for t in inside if isinstance(t, Tensor) and t.is_floating_point()]


def _is_finite(tensor: Tensor) -> bool:
    return bool(torch.isfinite(tensor.detach()).all())


def _bad_names(tensors: Any) -> list[str]:
    return [name for name, tensor in tensors if not _is_finite(tensor)]


def _listed(names: object) -> str:
    assert isinstance(names, list)
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return ", ".join(names[:MOST_NAMED]) + more
