"""Creates an optimizer, ours or a user's, over the groups of the ledger, and checks it.

The ledger decides which parameter is in which group, with which weight decay. An optimizer may
form other groups of them, but must step each parameter once and no others.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch

from surefoot.core.errors import ModelError, RequestError
from surefoot.core.targets import call, takes

Groups = list[dict[str, Any]]
MakeOptimizer = Callable[[Groups], torch.optim.Optimizer]
"""A class or function from parameter groups to an optimizer, such as `torch.optim.RAdam`."""


def make_over_groups(
    found: Any, groups: Groups, lr: float, arguments: Mapping[str, Any], name: str
) -> torch.optim.Optimizer:
    """`found(groups, **arguments)`: an optimizer over these groups.

    Args:
        found: a class or function of parameter groups.
        groups: each holds `params`, `lr`, `weight_decay`, `lr_multiplier`, `name` and
            `parameter_names`.
        lr: the peak rate; passed by name, too, if the signature has it.
        arguments: passed by name.
        name: of `found`, for messages.

    Raises:
        RequestError: it takes other arguments, or returns no usable optimizer.
        ModelError: the optimizer steps other parameters than those of the groups.
    """
    for group in groups:
        group["lr"] = lr
    names = {
        id(p): n for g in groups for p, n in zip(g["params"], g["parameter_names"], strict=True)
    }
    given = {"lr": lr} if takes(found, "lr") else {}
    if taken := sorted({"lr", "weight_decay"} & arguments.keys()):
        raise RequestError(
            f"optimizer.arguments holds {taken[0]}",
            where=f"optimizer.arguments.{taken[0]}",
            rule="the rate and the weight decay stand in each parameter group",
            remedy=f"write optimizer.{taken[0]}",
        )
    made: torch.optim.Optimizer = call(found, (groups,), {**given, **arguments}, name, "optimizer")
    _refuse_unusable(made, name)
    _name_parameters(made, names, name)
    return made


def _refuse_unusable(made: Any, name: str) -> None:
    if not isinstance(made, torch.optim.Optimizer):
        raise RequestError(
            f"{name} gave a {type(made).__name__}",
            where="optimizer",
            rule="an optimizer is a torch.optim.Optimizer over the groups it is called with",
            remedy="return the optimizer itself",
        )
    closure = inspect.signature(made.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise RequestError(
            f"{name} steps with a closure",
            where="optimizer",
            rule="an update has one forward and backward, whose gradients are there when it steps",
            remedy="take an optimizer whose step() needs no closure",
        )
    without = [index for index, group in enumerate(made.param_groups) if "lr" not in group]
    if without:
        raise RequestError(
            f"group {without[0]} of {name} has no lr",
            where="optimizer",
            rule="the schedule sets the lr of each group",
            remedy="keep the groups that it was called with, or give each an lr",
        )


def _name_parameters(made: torch.optim.Optimizer, names: Mapping[int, str], name: str) -> None:
    """Adds the names that a checkpoint needs to groups that the optimizer formed itself."""
    stepped = [id(p) for group in made.param_groups for p in group["params"]]
    if sorted(stepped) != sorted(names):
        missing = [names[key] for key in names if key not in stepped]
        raise ModelError(
            f"{name} steps {len(stepped)} parameters, its groups hold {len(names)}",
            where=f"missing: {', '.join(missing[:5])}"
            if missing
            else "a parameter is in two groups",
            rule="each parameter of the groups is in exactly one group of the optimizer",
            remedy="make every group from the parameters of the groups that it is called with",
        )
    for index, group in enumerate(made.param_groups):
        group.setdefault("name", f"group {index}")
        group["parameter_names"] = [names[id(parameter)] for parameter in group["params"]]
