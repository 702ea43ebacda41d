"""The ledger: each trainable tensor in exactly one group, with the rule that decided."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from surefoot.core.errors import ModelError, RequestError
from surefoot.optim.ledger import (
    GroupOverride,
    LedgerRow,
    ParameterLedger,
    check_groups,
    first_few,
    mixed_decay_groups,
    name_groups,
)


class RMSNorm(nn.Module):
    """A norm of the user's own, unknown to torch."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(size))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln_1 = RMSNorm(4)
        self.proj = nn.Linear(4, 4)
        self.relative_attention_bias = nn.Embedding(8, 2)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(6, 4)
        self.pos_embed = nn.Parameter(torch.zeros(1, 3, 4))
        self.block = Block()
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.tokens.weight


def rows(model: nn.Module, **options) -> dict[str, LedgerRow]:
    ledger = ParameterLedger.build(model, weight_decay=0.1, **options)
    return {row.name: row for row in ledger.rows}


def test_by_dimension_matrices_decay_and_norms_and_biases_do_not() -> None:
    found = rows(Tied())
    assert {name: row.weight_decay for name, row in found.items()} == {
        "tokens.weight": 0.1,
        "pos_embed": 0.1,
        "block.ln_1.scale": 0.0,
        "block.proj.weight": 0.1,
        "block.proj.bias": 0.0,
        "block.relative_attention_bias.weight": 0.1,
    }
    assert {row.decided_by for row in found.values()} == {"dimension"}
    assert found["block.proj.bias"].reason == "1 dim"
    assert found["tokens.weight"].shape == (6, 4)
    assert found["tokens.weight"].num_elements == 24
    assert found["tokens.weight"].dtype == "float32"


def test_by_name_decides_where_asked() -> None:
    found = rows(Tied(), rule="name")
    assert found["block.relative_attention_bias.weight"].weight_decay == 0.0
    assert found["block.ln_1.scale"].weight_decay == 0.0
    assert found["block.proj.weight"].weight_decay == 0.1
    assert {row.decided_by for row in found.values()} == {"name"}
    assert "RMSNorm" in found["block.ln_1.scale"].reason


@pytest.mark.parametrize("rule", ["dimension", "name"])
def test_disagreements_are_listed_under_either_rule(rule: str) -> None:
    ledger = ParameterLedger.build(Tied(), weight_decay=0.1, rule=rule)
    assert [row.name for row in ledger.disagreements] == ["block.relative_attention_bias.weight"]
    (row,) = ledger.disagreements
    assert row.by_dimension and not row.by_name
    assert "bias" in row.name_reason


def test_one_switch_takes_embeddings_out_under_either_rule() -> None:
    for rule in ("dimension", "name"):
        found = rows(Tied(), rule=rule, decay_embeddings=False)
        embeddings = ["tokens.weight", "pos_embed", "block.relative_attention_bias.weight"]
        for name in embeddings:
            assert found[name].weight_decay == 0.0
            assert found[name].decided_by == "embeddings"
        assert found["block.proj.weight"].weight_decay == 0.1


def test_a_tied_tensor_stands_once_with_its_other_names() -> None:
    found = rows(Tied())
    assert found["tokens.weight"].aliases == ("head.weight",)
    assert "head.weight" not in found


def test_a_shared_module_stands_once_with_its_other_names() -> None:
    model = nn.Module()
    model.first = nn.Linear(2, 2)
    model.second = model.first
    assert {n: r.aliases for n, r in rows(model).items()} == {
        "first.weight": ("second.weight",),
        "first.bias": ("second.bias",),
    }


def test_frozen_parameters_never_appear() -> None:
    model = Tied()
    model.block.proj.requires_grad_(False)
    ledger = ParameterLedger.build(model, weight_decay=0.1)
    listed = {id(p) for group in ledger.groups() for p in group["params"]}
    assert not any(id(p) in listed for p in model.block.proj.parameters())
    assert "block.proj.weight" not in {row.name for row in ledger.rows}


def test_rows_follow_the_order_of_the_model() -> None:
    model = Tied()
    expected = [name for name, _ in model.named_parameters()]
    ledger = ParameterLedger.build(model, weight_decay=0.1)
    assert [row.name for row in ledger.rows] == expected
    assert all(
        mine is other for mine, other in zip(ledger.parameters, model.parameters(), strict=True)
    )


def test_overrides_set_rate_and_decay_by_name() -> None:
    overrides = [
        GroupOverride("tokens.*", lr_multiplier=0.5),
        GroupOverride("block.proj.*", weight_decay=0.02),
    ]
    found = rows(Tied(), overrides=overrides)
    assert found["tokens.weight"].lr_multiplier == 0.5
    assert found["tokens.weight"].weight_decay == 0.1
    assert found["tokens.weight"].group == "tokens.* decay"
    for name in ("block.proj.weight", "block.proj.bias"):
        assert found[name].weight_decay == 0.02
        assert found[name].decided_by == "override"
        assert found[name].group == "block.proj.*"
    assert found["pos_embed"].group == "decay"
    assert found["pos_embed"].lr_multiplier == 1.0


def test_a_pattern_is_case_sensitive_and_on_the_whole_name() -> None:
    for pattern in ("Tokens.*", "proj.*"):
        with pytest.raises(RequestError, match="no trainable parameter matches"):
            rows(Tied(), overrides=[GroupOverride(pattern)])


def test_an_idle_override_is_an_error() -> None:
    with pytest.raises(RequestError) as caught:
        rows(Tied(), overrides=[GroupOverride("haed.*"), GroupOverride("tokens.*")])
    assert "'haed.*'" in str(caught.value) and "'tokens.*'" not in str(caught.value)


def test_a_parameter_in_two_groups_is_an_error() -> None:
    with pytest.raises(RequestError, match=r"block\.proj\.weight matches 2"):
        rows(Tied(), overrides=[GroupOverride("block.*"), GroupOverride("*.proj.*")])


@pytest.mark.parametrize("value", [-0.1, float("nan"), float("inf")])
def test_numbers_out_of_range_are_refused(value: float) -> None:
    with pytest.raises(RequestError):
        ParameterLedger.build(Tied(), weight_decay=value)
    with pytest.raises(RequestError):
        GroupOverride("*", lr_multiplier=value)
    with pytest.raises(RequestError):
        GroupOverride("*", weight_decay=value)


def test_a_fully_frozen_model_is_an_error() -> None:
    with pytest.raises(ModelError, match="no trainable parameter"):
        ParameterLedger.build(nn.Linear(2, 2).requires_grad_(False), weight_decay=0.1)


def test_a_lazy_parameter_is_an_error() -> None:
    with pytest.raises(ModelError, match="no shape yet"):
        ParameterLedger.build(nn.LazyLinear(2), weight_decay=0.1)


def test_a_sparse_embedding_is_an_error() -> None:
    with pytest.raises(ModelError, match="sparse"):
        ParameterLedger.build(nn.Embedding(3, 2, sparse=True), weight_decay=0.1)


@settings(deadline=None, max_examples=40)
@given(
    layers=st.lists(
        st.sampled_from(["linear", "norm", "embedding", "frozen", "tied"]), min_size=1, max_size=8
    ),
    rule=st.sampled_from(["dimension", "name"]),
    decay_embeddings=st.booleans(),
)
def test_each_trainable_tensor_is_in_exactly_one_group(
    layers: list[str], rule: str, decay_embeddings: bool
) -> None:
    made: list[nn.Module] = [nn.Linear(2, 2)]
    for kind in layers:
        if kind == "tied":
            made.append(nn.Linear(2, 2))
            made[-1].weight = made[0].weight
        else:
            made.append(
                {
                    "linear": lambda: nn.Linear(2, 2),
                    "norm": lambda: nn.LayerNorm(2),
                    "embedding": lambda: nn.Embedding(3, 2),
                    "frozen": lambda: nn.Linear(2, 2).requires_grad_(False),
                }[kind]()
            )
    model = nn.Sequential(*made)
    ledger = ParameterLedger.build(
        model, weight_decay=0.1, rule=rule, decay_embeddings=decay_embeddings
    )
    groups = ledger.groups()
    check_groups(model, groups)
    for group in groups:
        assert len(group["params"]) == len(group["parameter_names"])
        for name, parameter in zip(group["parameter_names"], group["params"], strict=True):
            assert model.get_parameter(name) is parameter
    assert sum(row.num_elements for row in ledger.rows) == sum(
        p.numel() for p in model.parameters() if p.requires_grad
    )


def test_check_groups_names_what_is_missing_twice_frozen_or_foreign() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].bias.requires_grad_(False)
    groups = [
        {"params": [model[0].weight, model[1].bias]},
        {"params": [model[0].weight, nn.Parameter(torch.ones(3))]},
    ]
    with pytest.raises(ModelError) as caught:
        check_groups(model, groups)
    text = str(caught.value)
    assert "0.weight is in 2 groups" in text
    assert "0.bias is in no group" in text
    assert "1.weight is in no group" in text
    assert "shape (2,) is frozen" in text
    assert "shape (3,) is not of this model" in text


def test_name_groups_fits_an_optimizer_made_elsewhere() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(
        [{"params": [model.bias]}, {"params": [model.weight], "name": "w"}]
    )
    name_groups(model, optimizer.param_groups)
    assert [g["name"] for g in optimizer.param_groups] == ["group 0", "w"]
    assert [g["parameter_names"] for g in optimizer.param_groups] == [["bias"], ["weight"]]
    with pytest.raises(ModelError):
        name_groups(nn.Linear(2, 2), optimizer.param_groups)


def test_mixed_decay_groups_warns_of_uniform_decay() -> None:
    model = nn.Linear(2, 2)
    uniform = [{"params": list(model.parameters()), "weight_decay": 0.1}]
    (sentence,) = mixed_decay_groups(uniform)
    assert "group 0" in sentence and "1 tensors" in sentence
    assert mixed_decay_groups([{"params": list(model.parameters()), "weight_decay": 0.0}]) == []
    assert mixed_decay_groups(ParameterLedger.build(model, weight_decay=0.1).groups()) == []
    assert mixed_decay_groups([{"params": list(model.parameters())}]) == []


def test_the_ledger_says_which_rule_decided_and_an_override_changes_nothing_by_itself() -> None:
    for rule in ("dimension", "name"):
        assert ParameterLedger.build(Tied(), weight_decay=0.1, rule=rule).rule == rule
    plain, overridden = rows(Tied()), rows(Tied(), overrides=[GroupOverride("tokens.*")])
    row = overridden["tokens.weight"]
    assert (row.lr_multiplier, row.weight_decay) == (1.0, plain["tokens.weight"].weight_decay)


@pytest.mark.parametrize("count", [1, 5, 6, 12])
def test_an_error_names_a_few_and_counts_the_rest(count: int) -> None:
    text = first_few([f"t{i}" for i in range(count)])
    assert text.count("t") == min(count, 5)
    assert text.endswith(f"; and {count - 5} more") == (count > 5)


def test_zero_turns_decay_and_rate_off() -> None:
    override = GroupOverride("tokens.*", lr_multiplier=0.0, weight_decay=0.0)
    ledger = ParameterLedger.build(Tied(), weight_decay=0.0, overrides=[override])
    assert {row.weight_decay for row in ledger.rows} == {0.0}
    assert ledger.rows[0].name == "pos_embed" and ledger.rows[0].lr_multiplier == 1.0
    assert {row.lr_multiplier for row in ledger.rows if row.group == "tokens.*"} == {0.0}
