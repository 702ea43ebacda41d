"""Reading an autograd graph before it is used: leaves, loss terms, softmax behind views.

Only reads. Never runs a node, never unpacks a saved tensor unless `saved` says that no hook could
be called by it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

Node = Any
"""`torch.autograd.graph.Node`; its attributes differ by kind."""

WALK_LIMIT = 50_000
MARK = "surefoot"
"""Key of our notes in a node's metadata, a dict that lives exactly as long as the node."""
SCALE_MARK = "surefoot-loss-scale"
VIEWS = (
    "View",
    "ReshapeAlias",
    "UnsafeView",
    "Transpose",
    "Permute",
    "Slice",
    "Select",
    "Squeeze",
    "Unsqueeze",
    "Clone",
    "ToCopy",
    "T",
    "Alias",
    "Contiguous",
    "AsStrided",
    "Expand",
)
_MEAN_LOSSES = (
    "NllLoss",
    "NllLoss2D",
    "MseLoss",
    "SmoothL1Loss",
    "HuberLoss",
    "BinaryCrossEntropy",
    "BinaryCrossEntropyWithLogits",
    "SoftMarginLoss",
    "MultiMarginLoss",
)
_REDUCTIONS = {0: "none", 1: "mean", 2: "sum"}
saved_hooks_seen = False
"""Whether hooks on saved tensors were ever in use; then reading one could run user code."""


class LossTerm(NamedTuple):
    """One summand of what is backpropagated: `factor` × a reduced loss."""

    factor: float | None
    """Product of the constant factors; None where a factor is a tensor of a device."""
    reduction: str
    """`mean`, `sum` or `other`."""
    loss: str
    """Kind of the node that reduces, such as `NllLoss`."""
    num_targets: float | None
    """Targets that count, where a cross entropy tells."""
    divided_by: tuple[float, ...] = ()
    """Tensor-valued divisors met on the way (not Python numbers)."""
    node: int = 0
    """Identity of the reducing node."""


def notes_of(node: Any) -> dict[Any, Any]:
    """What is noted at a node of the autograd graph; torch keeps it while the node lives."""
    notes: dict[Any, Any] = node.metadata
    return notes


def kind(node: Node) -> str:
    """Name of a node's operation: `NllLossBackward0` is `NllLoss`."""
    name: str = node.name()
    head, _, _ = name.rpartition("Backward")
    return (head or name).split("::")[-1]


def nodes(root: Node, limit: int = WALK_LIMIT) -> Iterator[Node]:
    """Every node behind `root`, itself first."""
    if root is None:
        return
    seen = {root}
    stack = [root]
    while stack and len(seen) < limit:
        node = stack.pop()
        yield node
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                stack.append(following)


def leaves(root: Node, limit: int = WALK_LIMIT) -> Iterator[torch.Tensor]:
    """Every leaf tensor that `root` depends on and that asks for a gradient."""
    for node in nodes(root, limit):
        variable = getattr(node, "variable", None)
        if variable is not None:
            yield variable


def leaf_ids(root: Node, limit: int = 5_000) -> frozenset[int]:
    """Identities of the leaves behind `root`."""
    return frozenset(id(leaf) for leaf in leaves(root, limit))


def through_views(node: Node, also: tuple[str, ...] = ()) -> Node:
    """The first node behind `node` that does more than to view or cast."""
    allowed = VIEWS + also
    for _ in range(32):
        if node is None or kind(node) not in allowed:
            return node
        node = node.next_functions[0][0] if node.next_functions else None
    return node


def is_sigmoid(node: Node) -> bool:
    """Whether a node is a sigmoid, or the end of one written out: 1 / (1 + exp(-x))."""
    kinds = []
    for _ in range(8):
        node = through_views(node, ("Clamp", "ClampMin", "ClampMax", "Mul"))
        if node is None:
            break
        kinds.append(kind(node))
        parents = [following for following, _ in node.next_functions if following is not None]
        if kinds[-1] == "Sigmoid" or len(parents) != 1:
            break
        node = parents[0]
    return kinds[:1] == ["Sigmoid"] or (
        kinds[:1] in (["Reciprocal"], ["Div"], ["Pow"]) and kinds[1:3] in (["Add", "Exp"],)
    )


def output_shape(node: Node, index: int = 0) -> tuple[int, ...] | None:
    """Shape of output `index` of a node."""
    try:
        return tuple(node._input_metadata[index].shape)
    except (AttributeError, IndexError, RuntimeError):
        return None


def saved(node: Node, name: str) -> Any:
    """A value that a node saved, or None: where it is gone, or hooks might be called."""
    if saved_hooks_seen:
        return None
    try:
        return getattr(node, "_saved_" + name, None)
    except RuntimeError:
        return None


def number(value: Any) -> float | None:
    """A scalar as a Python number, where reading it makes no host wait for a device."""
    if isinstance(value, bool | int | float):
        return float(value)
    if isinstance(value, torch.Tensor) and value.numel() == 1 and value.device.type == "cpu":
        return float(value.detach())
    return None


def tensors_in(value: Any, depth: int = 4) -> Iterator[torch.Tensor]:
    """The tensors inside nested lists, tuples, dicts and dataclass-like outputs."""
    if isinstance(value, torch.Tensor):
        yield value
    elif depth and isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item, depth - 1)
    elif depth and isinstance(value, list | tuple):
        for item in value[:64]:
            yield from tensors_in(item, depth - 1)
    elif depth and hasattr(value, "__dict__") and not isinstance(value, torch.nn.Module | type):
        for item in list(vars(value).values())[:64]:
            yield from tensors_in(item, depth - 1)


def is_readable(tensor: torch.Tensor, deep: bool = False) -> bool:
    """Whether a tensor has values, one after another, that the host may read now."""
    on_host = tensor.device.type == "cpu" or (deep and tensor.device.type != "meta")
    is_plain = tensor.layout is torch.strided and not tensor.is_quantized and not tensor.is_nested
    return on_host and is_plain


def first_node(value: Any) -> Node | None:
    """The node of the first tensor in `value` that has a graph behind it."""
    return next((t.grad_fn for t in tensors_in(value) if t.grad_fn is not None), None)


def _is_wrapped(value: Any) -> bool:
    # A Python number in an expression is saved as a 0-dim float64 CPU tensor.
    return (
        not isinstance(value, torch.Tensor)
        or (value.dim() == 0 and value.device.type == "cpu" and value.dtype == torch.float64)
        or (value.dim() == 0 and value.device.type == "cpu" and value.dtype == torch.int64)
    )


def loss_terms(root: torch.Tensor, limit: int = 64) -> tuple[LossTerm, ...]:
    """What a backpropagated scalar is the sum of."""
    if root.grad_fn is None or root.numel() != 1:
        return ()
    found: list[LossTerm] = []
    stack: list[tuple[Node, float | None, tuple[float, ...]]] = [(root.grad_fn, 1.0, ())]
    steps = 0
    while stack and steps < limit:
        steps += 1
        node, factor, divisors = stack.pop()
        name = kind(node)
        parents = [following for following, _ in node.next_functions]
        if name in ("Add", "Sub") and any(p is not None for p in parents):
            sign = -1.0 if name == "Sub" else 1.0
            for position, parent in enumerate(parents):
                if parent is not None:
                    scaled = factor if position == 0 or factor is None else factor * sign
                    stack.append((parent, scaled, divisors))
        elif name in ("Mul", "Div", "Neg") and sum(p is not None for p in parents) == 1:
            factor, divisors = _scaled(node, name, parents, factor, divisors)
            stack.append((next(p for p in parents if p is not None), factor, divisors))
        elif name in (*VIEWS,) and parents and parents[0] is not None:
            stack.append((parents[0], factor, divisors))
        else:
            found.append(_term(node, name, factor, divisors))
    return tuple(found)


def _scaled(
    node: Node,
    name: str,
    parents: list[Node],
    factor: float | None,
    divisors: tuple[float, ...],
) -> tuple[float | None, tuple[float, ...]]:
    if SCALE_MARK in node.metadata:
        return factor, divisors
    if name == "Neg":
        return (None if factor is None else -factor), divisors
    other = saved(node, "other" if parents[0] is not None else "self")
    value = number(other)
    if value is None:
        # `x / 4` of a Python number may save nothing that can be read: unknown, not one.
        return None, divisors
    if name == "Div":
        if not _is_wrapped(other):
            divisors = (*divisors, value)
        return (None if factor is None or value == 0 else factor / value), divisors
    return (None if factor is None else factor * value), divisors


def _term(node: Node, name: str, factor: float | None, divisors: tuple[float, ...]) -> LossTerm:
    reduction, count = "other", None
    if name in _MEAN_LOSSES:
        value = getattr(node, "_saved_reduction", None)
        reduction = _REDUCTIONS.get(value, "other") if isinstance(value, int) else "other"
        if name.startswith("NllLoss") and reduction == "mean":
            count = number(saved(node, "total_weight"))
    elif name == "Mean":
        reduction = "mean"
    elif name == "Sum":
        reduction = "sum"
    return LossTerm(factor, reduction, name, count, divisors, hash(node))
