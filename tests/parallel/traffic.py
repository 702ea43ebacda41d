"""What travels between ranks, seen from below the library: operators of torch.distributed."""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

NOT_TRAFFIC = ("wait_tensor", "_wrap_tensor_autograd", "monitored_barrier_")


class Traffic(TorchDispatchMode):
    """Counts the collectives inside, and the elements of the largest tensor that each takes."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.largest: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        namespace, _, name = func._schema.name.partition("::")
        if namespace in ("c10d", "_c10d_functional") and name not in NOT_TRAFFIC:
            self.calls[name] += 1
            seen = [
                leaf.numel() for leaf in tree_leaves((args, result)) if isinstance(leaf, Tensor)
            ]
            self.largest[name] = max(self.largest[name], *seen)
        return result
