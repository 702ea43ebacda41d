"""The loss and the gradients of a run's first window, in processes of their own. Steps nothing.

The window is passed by the parts that train, laid out as the recipe asks, and its numbers are
written to a folder. As `python -m surefoot.verify.window_numbers FILE` it is one rank of several.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from surefoot.assembly.checks import check_trainable
from surefoot.assembly.material import prepare_material
from surefoot.assembly.process import prepare_process
from surefoot.assembly.run_parts import Assembly, Material, assemble
from surefoot.config.load import load_recipe
from surefoot.engine.passes import TOTAL
from surefoot.numerics.determinism import seed_everything
from surefoot.numerics.loss_scaling import NoLossScale
from surefoot.numerics.modes import mode_sensitive_modules
from surefoot.parallel.join import fails_first
from surefoot.parallel.launch import end_with_launcher
from surefoot.state.tensor_file import write_tensors
from surefoot.tasks.task import split_dependence
from surefoot.verify.processes import write_error

PASSED_NAME = "passed.json"
ERROR_NAME = "error.json"
GRADIENTS_SUFFIX = ".safetensors"
MODULE = "surefoot.verify.window_numbers"


@dataclass(frozen=True)
class AskedWindow:
    """What is passed; all of it can be written as JSON."""

    recipe: str
    overrides: tuple[str, ...]
    folder: str
    """An empty folder for the numbers."""
    draws: int = 0
    """What the forward draws at random comes from this seed."""
    watches_types: bool = False
    """Looks for the least exact number type; one rank, not compiled."""


@dataclass(frozen=True)
class PassedWindow:
    """What came out."""

    loss: float
    sample_ids: tuple[int, ...]
    """Of the window over all ranks, sorted."""
    gradients: Mapping[str, Tensor]
    """Of each parameter that has one, whole."""
    names: tuple[str, ...]
    """Of all trainable parameters, in the order of the model."""
    narrowest: str
    """The least exact number type that the window was computed with, where it was looked for."""
    stilled: tuple[str, ...]
    """Kinds of modules that draw numbers or look at the whole batch: put into evaluation mode."""
    left_out: Mapping[str, str] = field(default_factory=dict)
    """Terms of the loss that are declared to be another loss under another split, and why."""


class NarrowestType(TorchDispatchMode):
    """Remembers the least exact floating type to which a float64 number was turned."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.dtype = torch.float64

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if any(_is_double(leaf) for leaf in tree_leaves((args, kwargs))):
            for leaf in tree_leaves(out):
                if isinstance(leaf, Tensor) and leaf.dtype.is_floating_point:
                    self.dtype = max(self.dtype, leaf.dtype, key=lambda d: torch.finfo(d).eps)
        return out


def _is_double(leaf: object) -> bool:
    return isinstance(leaf, Tensor) and leaf.dtype is torch.float64


def pass_window(asked: AskedWindow) -> None:
    """Passes the window and writes its numbers; every rank of a layout calls it.

    Raises:
        SurefootError: the recipe cannot be trained so.
    """
    recipe = load_recipe(asked.recipe, asked.overrides).recipe
    process = prepare_process(recipe.settings)
    material = prepare_material(recipe).material
    check_trainable(material, recipe.settings)
    stilled = make_exact(material.model)
    assembly = assemble(material, recipe.settings, process)
    with closing(assembly):
        _pass(assembly, asked, stilled)


def make_exact(model: nn.Module) -> tuple[str, ...]:
    """Makes a model compute in float64, without chance and item by item, in place.

    Returns:
        The kinds of modules that were put into evaluation mode for it.
    """
    model.double()
    model.register_forward_pre_hook(_as_double, with_kwargs=True)
    changed = [entry for entry in mode_sensitive_modules(model) if entry.training]
    for entry in changed:
        model.get_submodule(entry.name).training = False
    return tuple(sorted({entry.kind for entry in changed}))


def _as_double(module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
    def widened(tensor: Tensor) -> Tensor:
        return tensor.double() if tensor.dtype.is_floating_point else tensor

    return tree_map_only(Tensor, widened, args), tree_map_only(Tensor, widened, kwargs)


def _pass(assembly: Assembly, asked: AskedWindow, stilled: Sequence[str]) -> None:
    trainable, place = assembly.trainable, assembly.place
    passing = trainable.passing
    with closing(assembly.open_windows(trainable.state.progress.cursor)) as windows:
        window = next(windows)
    left_out = split_dependence(assembly.evaluator.task)
    # Divided by infinity, a term and its gradient are 0.
    denominators = {
        term: math.inf if term in left_out else weight
        for term, weight in passing.ranks.sum_over_ranks(window.weights).items()
    }
    seed_everything(asked.draws)
    types = NarrowestType()
    with types if asked.watches_types else nullcontext():
        losses = passing.run_pass(window.micro_batches, denominators, NoLossScale())
    gradients = {
        name: _whole(parameter.grad)
        for name, parameter in assembly.material.model.named_parameters()
        if parameter.grad is not None
    }
    has_own_data = place.mesh is None or place.mesh.leads
    ids = place.ranks.gather("sample ids", list(window.sample_ids) if has_own_data else [])
    names = place.ranks.gather("names", _trainable_names(assembly.material))
    folder, rank = Path(asked.folder), place.ranks.rank
    if speaks_for_stage(assembly):
        write_tensors(folder / f"{rank}{GRADIENTS_SUFFIX}", gradients)
    if rank == 0:
        numbers = {
            "loss": float(losses[TOTAL]),
            "sample_ids": sorted(number for of_rank in ids for number in of_rank),
            "names": list(dict.fromkeys(name for of_rank in names for name in of_rank)),
            "narrowest": str(types.dtype).removeprefix("torch."),
            "stilled": list(stilled),
            "left_out": dict(left_out),
        }
        (folder / PASSED_NAME).write_text(json.dumps(numbers), encoding="utf-8")


def speaks_for_stage(assembly: Assembly) -> bool:
    """Whether this rank writes its gradients: one rank does for each stage of a pipeline."""
    mesh = assembly.place.mesh
    if mesh is None:
        return True
    place = mesh.sizes.coordinates(mesh.rank)
    return all(place[axis] == 0 for axis in place if axis != "pipeline")


def _trainable_names(material: Material) -> list[str]:
    return [name for name, p in material.model.named_parameters() if p.requires_grad]


def _whole(gradient: Tensor) -> Tensor:
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient


def read_passed(folder: Path) -> PassedWindow:
    """What `pass_window` has left in a folder."""
    numbers = json.loads((folder / PASSED_NAME).read_text(encoding="utf-8"))
    gradients: dict[str, Tensor] = {}
    for path in sorted(folder.glob(f"*{GRADIENTS_SUFFIX}")):
        gradients |= load_file(path)
    return PassedWindow(
        loss=numbers["loss"],
        sample_ids=tuple(numbers["sample_ids"]),
        gradients=gradients,
        names=tuple(numbers["names"]),
        narrowest=numbers["narrowest"],
        stilled=tuple(numbers["stilled"]),
        left_out=numbers["left_out"],
    )


def pass_window_in_child(asked: AskedWindow) -> None:
    """The body of a process: what goes wrong is written down, and ends it with 1."""
    # A console script starts without the folder it was called in: own code is found from there.
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        pass_window(asked)
    except BaseException as error:
        if fails_first():
            write_error(Path(asked.folder) / ERROR_NAME, error)
        raise SystemExit(1) from None


def main(arguments: Sequence[str]) -> None:
    """One rank: passes the window that a file asks for."""
    end_with_launcher()
    asked = json.loads(Path(arguments[0]).read_text(encoding="utf-8"))
    pass_window_in_child(AskedWindow(**{**asked, "overrides": tuple(asked["overrides"])}))


if __name__ == "__main__":
    main(sys.argv[1:])
