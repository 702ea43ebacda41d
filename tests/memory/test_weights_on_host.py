"""Weights that wait on the host while other blocks compute: the same bits, and room meanwhile."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from parallel.small_runs import settings_of, small_gpt
from surefoot.config.load import resolve_settings
from surefoot.core.errors import ConfigError, RequestError
from surefoot.memory.recompute import recompute_blocks
from surefoot.memory.weights_on_host import WeightsOnHost, check_weights_on_host

CPU = torch.device("cpu")
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
BLOCKS = 4


def model_on(device: str) -> Any:
    torch.manual_seed(0)
    return small_gpt(num_layers=BLOCKS).to(device)


def trained(model: Any, device: str, weights: WeightsOnHost | None) -> list[Tensor]:
    """Weights after three updates of two micro-batches each."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    ids = torch.randint(24, (6, 4, 10), generator=torch.Generator().manual_seed(1)).to(device)
    for update in range(3):

        def run_pass(start: int = 2 * update) -> None:
            for micro_batch in ids[start : start + 2]:
                model(micro_batch).float().square().mean().backward()

        if weights is None:
            run_pass()
        else:
            with weights.away():
                run_pass()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach().cpu() for parameter in model.parameters()]


@pytest.mark.parametrize("recompute", ["none", "blocks"])
@pytest.mark.parametrize("device", DEVICES)
def test_the_same_bits(device: str, recompute: Any) -> None:
    plain, spared = model_on(device), model_on(device)
    recompute_blocks(spared, recompute)
    weights = WeightsOnHost(spared, torch.device(device))
    pairs = zip(trained(spared, device, weights), trained(plain, device, None), strict=True)
    assert all(torch.equal(ours, theirs) for ours, theirs in pairs)
    assert list(spared.state_dict()) == list(plain.state_dict())


def test_at_most_two_blocks_are_there_while_one_computes() -> None:
    model = model_on("cpu")
    weights = WeightsOnHost(model, CPU)
    whole = sum(p.untyped_storage().nbytes() for b in model.blocks for p in b.parameters())
    assert weights.num_bytes == whole
    seen: list[int] = []

    def look(*_: Any) -> None:
        seen.append(sum(p.untyped_storage().nbytes() for b in model.blocks for p in b.parameters()))

    for block in model.blocks:
        block.feedforward.register_forward_hook(look)
        block.feedforward.register_full_backward_hook(look)
    with weights.away():
        model(torch.zeros(2, 10, dtype=torch.int64)).square().mean().backward()
    assert len(seen) == 2 * BLOCKS
    assert seen[:BLOCKS] == [whole // BLOCKS] * BLOCKS
    assert max(seen[BLOCKS:]) <= 2 * whole // BLOCKS
    look()
    assert seen[-1] == whole


def test_all_come_back_after_an_error() -> None:
    model = model_on("cpu")
    before = [parameter.detach().clone() for parameter in model.parameters()]
    with pytest.raises(ZeroDivisionError), WeightsOnHost(model, CPU).away():
        raise ZeroDivisionError
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))


def test_what_others_use_stays() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(3, 3) for _ in range(2)])
            self.head = nn.Linear(3, 3)
            self.head.weight = self.layers[0].weight

    model = Shared()
    weights = WeightsOnHost(model, CPU)
    with weights.away():
        assert model.head.weight.untyped_storage().nbytes() > 0
        assert model.layers[1].weight.untyped_storage().nbytes() == 0


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(RequestError, match="no repeated layers"):
        WeightsOnHost(nn.Linear(2, 2), CPU)
    with pytest.raises(RequestError, match="computes on the CPU"):
        check_weights_on_host(CPU, has_whole_model=True)
    with pytest.raises(RequestError, match="distributed over ranks"):
        check_weights_on_host(torch.device("cuda"), has_whole_model=False)
    check_weights_on_host(torch.device("cuda"), has_whole_model=True)
    memory = {"offload_parameters": "cpu"}
    with pytest.raises(ConfigError, match="brings each block's weights when it is called"):
        resolve_settings({**settings_of(memory=memory), "train": {**TRAIN, "compile": "blocks"}})


TRAIN = {"horizon": "2 steps", "micro_batch": 1}
