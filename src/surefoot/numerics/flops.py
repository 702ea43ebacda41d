"""Counts the floating-point operations of a forward and backward on shapes alone.

Nothing is computed: a copy of the model without memory is run on torch's meta device, so no random
number is drawn and the model, its buffers and its Python attributes stay as they are. What cannot
be counted right is refused, never estimated.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping
from math import prod
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

META = torch.device("meta")

COUNTED_NAMESPACES = ("aten", "prim", "prims")
UNCOUNTED = (
    "_addmm_activation",
    "_cdist",
    "_cudnn_rnn",
    "_fft",
    "_flash_attention",
    "_fused_sdp",
    "_grouped_mm",
    "_int_mm",
    "_linalg",
    "_native_multi_head",
    "_scaled_dot_product",
    "_scaled_grouped",
    "_thnn_fused",
    "_transformer_encoder",
    "_trilinear",
    "_weight_int",
    "cholesky",
    "linalg",
    "lstm",
    "miopen",
    "mkldnn",
    "ormqr",
    "triangular_solve",
)
"""How the names of operators begin that compute products and have no formula here."""
CHEAP = ("_linalg_check_errors", "linalg_cross", "linalg_vector_norm")
"""Those among them that do not."""

Shape = tuple[int, ...]


class UncountableError(Exception):
    """The operations cannot be counted; says why."""


def count_flops(model: nn.Module, loss: Callable[[nn.Module], Any]) -> int:
    """Operations of the matrix products, convolutions and attention of one forward and backward.

    A multiplication and an addition count as two. What a checkpoint computes again in the backward
    is left out, and frozen parameters have no gradient to compute: these are the model's own
    operations, as MFU counts them (PaLM, arXiv:2204.02311, appendix B).

    Args:
        model: as it is trained, before it is compiled, wrapped or spread over ranks.
        loss: of the model that it is given, on a batch on the meta device: a tensor, or several
            by name.

    Raises:
        UncountableError: the forward depends on values, runs an operator of unknown cost, or fails.
    """
    try:
        # What a model warns of, it warns of in its first update.
        with META, warnings.catch_warnings(action="ignore"):
            counter = FlopCounterMode(display=False, custom_mapping=_FORMULAS)
            with _Operators(counter) as operators, counter:
                found = loss(_without_memory(model).train())
                operators.in_backward = True
                terms = list(found.values()) if isinstance(found, Mapping) else [found]
                torch.stack([term for term in terms if term.requires_grad]).sum().backward()
    except Exception as error:
        first_sentence = str(error).strip().partition("\n")[0].partition(". ")[0]
        raise UncountableError(f"{type(error).__name__}: {first_sentence}") from error
    if operators.unknown:
        raise UncountableError(f"no formula for {', '.join(sorted(operators.unknown))}")
    return int(counter.get_total_flops() - operators.recomputed)


def _without_memory(model: nn.Module) -> nn.Module:
    """A copy whose parameters and buffers have shapes alone; tied ones stay tied."""
    known: dict[int, Any] = {}
    for tensor in model.buffers():
        known[id(tensor)] = torch.empty_like(tensor, device=META)
    for parameter in model.parameters():
        shape = torch.empty_like(parameter, device=META)
        known[id(parameter)] = nn.Parameter(shape, requires_grad=parameter.requires_grad)
    return copy.deepcopy(model, known)


class _Operators(TorchDispatchMode):
    """Sees every operator that runs below the counter: unknown ones, and what is computed again."""

    def __init__(self, counter: FlopCounterMode) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counter = counter
        self.in_backward = False
        self.unknown: set[str] = set()
        self.recomputed = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        formula = self.counter.flop_registry.get(getattr(func, "overloadpacket", func))
        if formula is None:
            if not _is_cheap(func):
                self.unknown.add(str(func))
        elif self.in_backward and torch.is_grad_enabled():
            # A backward runs without gradients; what runs with them is a forward, once more.
            self.recomputed += int(formula(*args, **kwargs, out_val=out))
        return out


def _is_cheap(operator: Any) -> bool:
    """Whether an operator without a formula costs no more than a look at each element."""
    namespace, _, name = operator.name().partition("::")
    if namespace not in COUNTED_NAMESPACES:
        return False
    return name.startswith(CHEAP) or not name.startswith(UNCOUNTED)


def _elements(first: Shape, *others: Any, **ignored: Any) -> int:
    return 2 * prod(first)


def _second_argument(first: Shape, matrix: Shape, *others: Any, **ignored: Any) -> int:
    return 2 * prod(matrix)


def _outer(first: Shape, left: Shape, right: Shape, **ignored: Any) -> int:
    return 2 * prod(left) * prod(right)


def _batched(first: Shape, left: Shape, right: Shape, **ignored: Any) -> int:
    return 2 * prod(left) * right[-1]


def _convolution_backward(
    grad_output: Shape, inputs: Shape, weight: Shape, *others: Any, **ignored: Any
) -> int:
    """As many products for the input, and again for the weight, as the forward has.

    Torch's own formula takes no account of groups in the gradient of the weight.
    """
    transposed, output_mask = others[4], others[7]
    places = inputs[2:] if transposed else grad_output[2:]
    return 2 * int(sum(output_mask[:2])) * inputs[0] * prod(places) * prod(weight)


_FORMULAS: dict[Any, Callable[..., int]] = {
    torch.ops.aten.mv: _elements,
    torch.ops.aten.dot: _elements,
    torch.ops.aten.vdot: _elements,
    torch.ops.aten.addmv: _second_argument,
    torch.ops.aten.addr: _outer,
    torch.ops.aten.addbmm: _batched,
    torch.ops.aten.convolution_backward: _convolution_backward,
}
"""Formulas that torch lacks or has wrong, by the shapes of their arguments."""
