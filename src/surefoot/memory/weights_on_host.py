"""Offloads the weights of blocks to the host while other blocks compute.

During the passes of a window a block's weights are on the device only while it computes, forward
and backward; before and after, all are, for the optimizer, the average and readers. Results are
bit-equal. Copies between pinned memory and the device are queued in stream order; the host waits
for none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import _unsafe_preserve_version_counter

from surefoot.core.errors import RequestError
from surefoot.memory.blocks import blocks_for


class WeightsOnHost:
    """The weights of a model's blocks; weights shared between blocks or layers are not moved.

    Args:
        model: on its device, laid out; its blocks get hooks, names stay.
        device: of the model.

    Raises:
        RequestError: the model has no repeated layers.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        blocks = blocks_for(
            model,
            "memory.offload_parameters",
            "weights of blocks are offloaded",
            "off",
        )
        uses = _uses(model)
        pinned = device.type == "cuda"
        self._blocks = [_Block(block, uses, pinned) for block in blocks]
        self._is_on = False
        for number, block in enumerate(blocks):
            block.register_forward_pre_hook(self._before_forward(number))
            block.register_forward_hook(self._after_forward(number))

    @property
    def num_bytes(self) -> int:
        """Size on the host while nothing computes."""
        return sum(block.num_bytes for block in self._blocks)

    @contextmanager
    def away(self) -> Iterator[None]:
        """Context manager: each block's weights are on the device only while it computes."""
        for block in self._blocks:
            block.send_away()
        self._is_on = True
        try:
            yield
        finally:
            self._is_on = False
            for block in self._blocks:
                block.bring()

    def _before_forward(self, number: int) -> Callable[..., None]:
        def bring(*_: Any) -> None:
            if self._is_on:
                self._blocks[number].bring()

        return bring

    def _after_forward(self, number: int) -> Callable[..., None]:
        def let_go(module: nn.Module, inputs: Any, outputs: Any) -> None:
            if not self._is_on:
                return
            self._blocks[number].let_go()
            for tensor in _tensors(outputs):
                if tensor.requires_grad:
                    tensor.register_hook(self._before_backward(number))

        return let_go

    def _before_backward(self, number: int) -> Callable[[Tensor], None]:
        def turn(_: Tensor) -> None:
            # The gradient of this output is complete, so the next block's backward is done.
            for later in self._blocks[number + 1 :]:
                later.let_go()
            self._blocks[number].bring()

        return turn


class _Block:
    """The weights of one block that no other module uses, and their host memory."""

    def __init__(self, block: nn.Module, uses: Counter[nn.Parameter], pinned: bool) -> None:
        self._weights = [p for p, times in _uses(block).items() if times == uses[p]]
        self._kept = [
            torch.empty(weight.shape, dtype=weight.dtype, pin_memory=pinned)
            for weight in self._weights
        ]
        self.num_bytes = sum(weight.untyped_storage().nbytes() for weight in self._weights)
        self._is_here = True

    def send_away(self) -> None:
        """Copies the weights to the host and frees their device memory."""
        with torch.no_grad():
            for weight, kept in zip(self._weights, self._kept, strict=True):
                kept.copy_(weight, non_blocking=True)
        self.let_go()

    def let_go(self) -> None:
        """Frees the device memory of weights on the host; they have not changed since."""
        if self._is_here:
            self._is_here = False
            for weight in self._weights:
                weight.untyped_storage().resize_(0)

    def bring(self) -> None:
        """Copies the weights back into their tensors, which the backward may reference already."""
        if self._is_here:
            return
        self._is_here = True
        with torch.no_grad(), _unsafe_preserve_version_counter(tuple(self._weights)):
            for weight, kept in zip(self._weights, self._kept, strict=True):
                weight.untyped_storage().resize_(kept.numel() * kept.element_size())
                weight.copy_(kept, non_blocking=True)


def check_weights_on_host(device: torch.device, has_whole_model: bool) -> None:
    """Refuses layouts that do not support weight offload.

    Raises:
        RequestError: the run computes on the CPU, or each rank holds a part of the weights.
    """
    if device.type == "cpu":
        raise RequestError(
            "memory.offload_parameters is cpu, and the run computes on the CPU",
            where="memory.offload_parameters",
            rule="offload moves weights from the memory of a device to the host",
            remedy="use memory.offload_parameters=off on the CPU",
        )
    if not has_whole_model:
        raise RequestError(
            "memory.offload_parameters is cpu, and the layers are distributed over ranks",
            where="memory.offload_parameters",
            rule="weights can be offloaded if each rank holds the full model",
            remedy="use parallel.shard alone, where each rank has a part of the weights",
        )


def _uses(model: nn.Module) -> Counter[nn.Parameter]:
    """Number of modules inside that use each parameter."""
    return Counter(
        parameter for module in model.modules() for parameter in module.parameters(recurse=False)
    )


def _tensors(outputs: Any) -> list[Tensor]:
    found = outputs if isinstance(outputs, (tuple, list)) else [outputs]
    return [value for value in found if isinstance(value, Tensor)]
