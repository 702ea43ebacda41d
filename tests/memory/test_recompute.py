"""Activations that are computed again give the same bits, and take less memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode

from parallel.small_runs import settings_of, small_gpt, train
from surefoot.core.errors import RequestError
from surefoot.memory.recompute import recompute_blocks


def kept_bytes(extent: Any, every: int = 1) -> int:
    """Bytes of distinct tensors that the forward keeps for the backward."""
    torch.manual_seed(0)
    model = small_gpt(num_layers=4)
    recompute_blocks(model, extent, every)
    seen: dict[int, int] = {}
    own = {p.data_ptr() for p in model.parameters()}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.data_ptr() not in own:
            seen[tensor.data_ptr()] = tensor.numel() * tensor.element_size()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        kept = model(torch.zeros(8, 10, dtype=torch.int64))
    assert kept.requires_grad
    return sum(seen.values())


@pytest.mark.parametrize("extent", ["blocks", "selective"])
@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_the_same_bits(extent: str, dropout: float) -> None:
    before = train("gpt", settings_of(), 4, torch.float32, dropout=dropout)
    settings = settings_of(memory={"recompute": extent})
    after = train("gpt", settings, 4, torch.float32, dropout=dropout)
    assert (after.losses, after.norms, after.metrics) == (
        before.losses,
        before.norms,
        before.metrics,
    )
    assert after.weights.keys() == before.weights.keys()
    assert all(torch.equal(after.weights[n], w) for n, w in before.weights.items())


def test_blocks_keep_less_and_every_second_one_half_as_much_less() -> None:
    whole, second, all_kept = kept_bytes("blocks"), kept_bytes("blocks", 2), kept_bytes("none")
    assert whole < second < all_kept
    saved = all_kept - whole
    assert all_kept - second == pytest.approx(saved / 2, rel=0.1)


def test_every_counts_from_the_first() -> None:
    assert recompute_blocks(small_gpt(num_layers=5), "blocks", 2) == 3
    assert recompute_blocks(small_gpt(num_layers=5), "none") == 0


def test_selective_computes_no_product_again() -> None:
    counts = {}
    for extent in ("none", "blocks", "selective"):
        torch.manual_seed(0)
        model = small_gpt()
        recompute_blocks(model, extent)  # type: ignore[arg-type]
        with FlopCounterMode(display=False) as flops:
            model(torch.zeros(2, 10, dtype=torch.int64)).sum().backward()
        counts[extent] = flops.get_total_flops()
    assert counts["none"] == counts["selective"] < counts["blocks"]


def test_a_model_without_blocks_is_refused() -> None:
    with pytest.raises(RequestError, match="no repeated layers"):
        recompute_blocks(nn.Linear(2, 2), "blocks")
