"""Two rules for weight decay, as pure functions of a tensor and its owners.

Decides for one tensor at a time and knows no groups; `ledger.py` runs both rules on every tensor
and shows where they disagree.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from surefoot.core.errors import ModelError

_WRAPPERS: Final = re.compile(
    r"(?:^|(?<=\.))(?:_orig_mod|_checkpoint_wrapped_module|_fsdp_wrapped_module)(?:\.|$)"
)
# What transformers' Trainer excludes (bias, layernorm, rmsnorm, norm, _norm; on lower-cased names),
# and the `norm1`, `ln_1` and `ln_f` that those patterns miss.
_UNDECAYED_NAMES: Final = (
    ("bias", re.compile(r"bias")),
    ("layernorm", re.compile(r"layernorm")),
    ("rmsnorm", re.compile(r"rmsnorm")),
    ("norm", re.compile(r"(?:^|[._])norm\d*(?:$|\.)")),
    ("ln_*", re.compile(r"(?:^|\.)ln(?:\d+|_\w+)?(?:$|\.)")),
)
_NORM_TYPES: Final = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.modules.batchnorm._NormBase)
_NORM_CLASS_NAME: Final = re.compile(r"(?:layer|rms|group|batch|instance)norm|norm(?:\dd)?$")
_EMBEDDING_TYPES: Final = (nn.Embedding, nn.EmbeddingBag)


@dataclass(frozen=True, slots=True)
class OwnedTensor:
    """A trainable tensor with all its names and all modules that hold it."""

    name: str
    aliases: tuple[str, ...]
    """Its other names, if it is tied or its module is shared."""
    parameter: nn.Parameter
    owners: tuple[nn.Module, ...]
    marked: bool
    """Whether the model excludes it from decay: `parameter._no_weight_decay = True`, or a name
    returned by the model's `no_weight_decay()`."""


@dataclass(frozen=True, slots=True)
class Opinion:
    """Decision of a rule about a tensor, and the reason."""

    decays: bool
    reason: str


def plain_name(name: str) -> str:
    """A parameter's name without the prefixes added by compile, recompute and FSDP wrappers."""
    return _WRAPPERS.sub("", name).rstrip(".")


def bare_module(model: nn.Module) -> nn.Module:
    """The model inside a data-parallel wrapper, whose names start with `module.`; else itself."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def named_trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """Plain name to trainable parameter, each tensor once, in model order."""
    return {
        plain_name(name): parameter
        for name, parameter in bare_module(model).named_parameters()
        if parameter.requires_grad
    }


def trainable_tensors(model: nn.Module) -> Iterator[OwnedTensor]:
    """Every trainable tensor of `model` once, in the order of `named_trainable`.

    Raises:
        ModelError: a parameter of a lazy module has no shape yet, or a gradient would be sparse.
    """
    model = bare_module(model)
    marked = _marked_names(model)
    names: dict[int, list[str]] = {}
    owners: dict[int, list[nn.Module]] = {}
    parameters: dict[int, nn.Parameter] = {}
    for module_name, module in model.named_modules(remove_duplicate=False):
        for leaf, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            if not parameter.requires_grad:
                continue
            name = plain_name(f"{module_name}.{leaf}" if module_name else leaf)
            _refuse_untrainable(name, parameter, module)
            parameters[id(parameter)] = parameter
            names.setdefault(id(parameter), []).append(name)
            owners.setdefault(id(parameter), []).append(module)
    for key, parameter in parameters.items():
        first, *aliases = names[key]
        is_marked = getattr(parameter, "_no_weight_decay", False) or marked & set(names[key])
        yield OwnedTensor(first, tuple(aliases), parameter, tuple(owners[key]), bool(is_marked))


def by_dimension(tensor: OwnedTensor) -> Opinion:
    """Tensors of two or more dims decay (nanoGPT's rule): matrices do, norms and biases do not."""
    dims = tensor.parameter.dim()
    return Opinion(dims >= 2, f"{dims} dim{'s' if dims != 1 else ''}")


def by_name(tensor: OwnedTensor) -> Opinion:
    """All decay except norms (by type or class name), biases and what the model marks."""
    if tensor.marked:
        return Opinion(False, "the model marks it as not decaying")
    for owner in tensor.owners:
        kind = type(owner).__name__
        if isinstance(owner, _NORM_TYPES) or _NORM_CLASS_NAME.search(kind.lower()):
            return Opinion(False, f"belongs to a {kind}")
    for name in (tensor.name, *tensor.aliases):
        for label, pattern in _UNDECAYED_NAMES:
            if pattern.search(name.lower()):
                return Opinion(False, f"its name matches '{label}'")
    return Opinion(True, "neither norm nor bias by type or name")


def is_embedding(tensor: OwnedTensor) -> bool:
    """Whether it is an embedding table (possibly tied to a head) or a bare `*embed*` parameter."""
    if any(isinstance(owner, _EMBEDDING_TYPES) for owner in tensor.owners):
        return True
    return "embed" in tensor.name.rpartition(".")[2].lower()


def _marked_names(model: nn.Module) -> frozenset[str]:
    listing = getattr(model, "no_weight_decay", None)
    return frozenset(listing()) if callable(listing) else frozenset()


def _refuse_untrainable(name: str, parameter: nn.Parameter, owner: nn.Module) -> None:
    if isinstance(parameter, nn.parameter.UninitializedParameter):
        raise ModelError(
            f"parameter {name} has no shape yet",
            where=name,
            rule="every parameter has a shape when the optimizer is built",
            remedy="run one batch through the lazy module first",
        )
    if isinstance(owner, _EMBEDDING_TYPES) and owner.sparse:
        raise ModelError(
            f"the gradient of {name} would be sparse",
            where=name,
            rule="the global norm, the clip and the optimizers here take dense gradients",
            remedy="create the embedding with sparse=False, or freeze it",
        )
