"""A budget of bytes for activations: kept to, with the same bits."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from parallel.small_runs import settings_of, small_gpt, train
from surefoot.config.load import resolve_settings
from surefoot.core.errors import ConfigError, RequestError
from surefoot.memory.recompute import recompute_blocks
from surefoot.memory.recompute_budget import ActivationBudget, budget_blocks
from surefoot.models.gpt import GPT

BLOCKS = 4
UNLIMITED = 1 << 40


def passed(budget_bytes: int, lengths: tuple[int, ...] = (10, 10)) -> tuple[ActivationBudget, GPT]:
    """A model with a budget after a forward and backward for each length."""
    torch.manual_seed(0)
    model = small_gpt(num_layers=BLOCKS)
    budget = budget_blocks(model, budget_bytes)
    for length in lengths:
        model(torch.zeros(8, length, dtype=torch.int64)).square().sum().backward()
    return budget, model


@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_the_same_bits(dropout: float, monkeypatch: pytest.MonkeyPatch) -> None:
    before = train("gpt", settings_of(), 4, torch.float32, dropout=dropout)
    one_block = passed(UNLIMITED)[0].kept_bytes // BLOCKS
    monkeypatch.setattr(
        "surefoot.parallel.layout.budget_blocks",
        lambda model, limit: budget_blocks(model, one_block),
    )
    settings = settings_of(memory={"recompute": "budget"})
    after = train("gpt", settings, 4, torch.float32, dropout=dropout)
    assert (after.losses, after.norms, after.metrics) == (
        before.losses,
        before.norms,
        before.metrics,
    )
    assert all(torch.equal(after.weights[n], w) for n, w in before.weights.items())


def test_blocks_keep_until_the_budget_is_spent() -> None:
    whole, _ = passed(UNLIMITED)
    assert whole.kept_blocks == BLOCKS
    for kept in range(1, BLOCKS + 1):
        limit = whole.kept_bytes * kept // BLOCKS + 1024
        budget, _ = passed(limit)
        assert budget.kept_blocks == kept
        assert budget.kept_bytes <= limit
    assert passed(0)[0].kept_blocks == 0


def test_the_measure_is_what_autograd_keeps() -> None:
    """Counted again from outside, over a model that computes nothing again."""
    torch.manual_seed(0)
    model = small_gpt(num_layers=BLOCKS)
    recompute_blocks(model, "none")
    seen: dict[int, int] = {}
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            seen[storage.data_ptr()] = storage.nbytes()
        return tensor

    kept = []
    for block in model.blocks:
        block.register_forward_pre_hook(lambda *_: kept.append(hooks.__enter__()))
        block.register_forward_hook(lambda *_: hooks.__exit__(None, None, None))
    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
    result = model(torch.zeros(8, 10, dtype=torch.int64))
    assert result.requires_grad and len(kept) == BLOCKS
    assert passed(UNLIMITED, (10,))[0].kept_bytes == sum(seen.values())


def test_longer_sequences_compute_more_again() -> None:
    limit = passed(UNLIMITED, (5, 5))[0].kept_bytes + 1024
    assert passed(limit, (5, 5))[0].kept_blocks == BLOCKS
    budget, _ = passed(limit, (5, 10))
    assert 0 < budget.kept_blocks < BLOCKS and budget.kept_bytes <= limit


def test_an_evaluation_spends_nothing() -> None:
    budget, model = passed(UNLIMITED)
    before = budget.kept_bytes
    with torch.no_grad():
        model(torch.zeros(8, 10, dtype=torch.int64))
    assert budget.kept_bytes == before


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(RequestError, match="no repeated layers"):
        budget_blocks(nn.Linear(2, 2), 1)
    with pytest.raises(ConfigError, match="needs to observe saved activations"):
        train_section = {"compile": "blocks", "horizon": "2 steps", "micro_batch": 1}
        resolve_settings({"memory": {"recompute": "budget"}, "train": train_section})
