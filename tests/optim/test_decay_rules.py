"""The two rules on one tensor at a time, and the names without wrapper prefixes."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed as distributed
from torch import nn

from surefoot.optim.decay_rules import (
    bare_module,
    by_dimension,
    by_name,
    is_embedding,
    named_trainable,
    plain_name,
    trainable_tensors,
)


def nest(path: str, leaf: nn.Module) -> nn.Module:
    """A model in which `leaf` sits at `path`."""
    root = nn.Module()
    at = root
    *parents, last = path.split(".")
    for name in parents:
        child = nn.Module()
        setattr(at, name, child)
        at = child
    setattr(at, last, leaf)
    return root


def opinions(model: nn.Module) -> dict[str, bool]:
    return {tensor.name: by_name(tensor).decays for tensor in trainable_tensors(model)}


class Own(nn.Module):
    """Holds a matrix of a name of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(2, 2))


@pytest.mark.parametrize(
    "path",
    [
        "layernorm", "h.0.post_attention_layernorm", "rmsnorm", "norm", "norm1", "block.norm2",
        "final_norm", "ln_1", "ln_f", "ln", "ln2", "h.ln_1", "bias_table", "a.relative_bias",
    ],
)  # fmt: skip
def test_names_that_do_not_decay(path: str) -> None:
    assert opinions(nest(path, Own())) == {f"{path}.scale": False}


@pytest.mark.parametrize(
    "path", ["linear", "normal", "enormous", "abnorm_al", "lnear", "kiln", "kiln_1", "unorm4x", "q"]
)
def test_names_that_only_look_alike_decay(path: str) -> None:
    assert opinions(nest(path, Own())) == {f"{path}.scale": True}


@pytest.mark.parametrize(
    "module",
    [nn.LayerNorm(2), nn.RMSNorm(2), nn.GroupNorm(1, 2), nn.BatchNorm2d(2)],
    ids=lambda module: type(module).__name__,
)
def test_norms_by_type_do_not_decay_whatever_their_name(module: nn.Module) -> None:
    assert set(opinions(nest("q", module)).values()) == {False}


@pytest.mark.parametrize("kind", ["LlamaRMSNorm", "LayerNormFp32", "MyNorm", "PixelNorm2d"])
def test_norms_by_class_name_do_not_decay(kind: str) -> None:
    assert set(opinions(nest("q", type(kind, (Own,), {})())).values()) == {False}


@pytest.mark.parametrize("kind", ["Normalised", "NormalHead", "Enormous"])
def test_classes_that_only_look_alike_decay(kind: str) -> None:
    assert set(opinions(nest("q", type(kind, (Own,), {})())).values()) == {True}


def test_a_bias_is_known_by_its_name() -> None:
    assert opinions(nn.Linear(2, 2)) == {"weight": True, "bias": False}


def test_what_the_model_marks_does_not_decay() -> None:
    model = Own()
    model.scale._no_weight_decay = True
    assert opinions(model) == {"scale": False}

    class Listing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cls_token = nn.Parameter(torch.zeros(1, 1, 2))
            self.q = nn.Linear(2, 2, bias=False)

        def no_weight_decay(self) -> set[str]:
            return {"cls_token"}

    assert opinions(Listing()) == {"cls_token": False, "q.weight": True}


def test_a_tensor_tied_to_a_norm_does_not_decay() -> None:
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.LayerNorm((2, 2)))
    model[1].weight = model[0].weight
    assert opinions(model)["0.weight"] is False


def test_the_alias_counts_for_the_name_rule() -> None:
    model = nn.Module()
    model.q = Own()
    model.final_norm = model.q
    assert opinions(model) == {"q.scale": False}


def test_dimension_counts_dims() -> None:
    model = nn.Module()
    for dims in range(4):
        setattr(model, f"t{dims}", nn.Parameter(torch.zeros((2,) * dims)))
    found = {t.name: by_dimension(t) for t in trainable_tensors(model)}
    assert [found[f"t{dims}"].decays for dims in range(4)] == [False, False, True, True]
    assert [found[f"t{dims}"].reason for dims in range(3)] == ["0 dims", "1 dim", "2 dims"]


def test_what_counts_as_an_embedding() -> None:
    model = nn.Module()
    model.bag = nn.EmbeddingBag(3, 2)
    model.pos_embed = nn.Parameter(torch.zeros(1, 2))
    model.patch_embed = nn.Linear(2, 2, bias=False)
    found = {t.name: is_embedding(t) for t in trainable_tensors(model)}
    assert found == {"pos_embed": True, "bag.weight": True, "patch_embed.weight": False}


@pytest.mark.parametrize(
    ("wrapped", "plain"),
    [
        ("_orig_mod.a.weight", "a.weight"),
        ("blocks.0._orig_mod.q.weight", "blocks.0.q.weight"),
        ("blocks.0._checkpoint_wrapped_module._orig_mod.q", "blocks.0.q"),
        ("_fsdp_wrapped_module.a", "a"),
        ("a._orig_mod", "a"),
        ("my_orig_mod.a", "my_orig_mod.a"),
        ("module.a", "module.a"),
    ],
)
def test_names_carry_no_wrapper_prefix(wrapped: str, plain: str) -> None:
    assert plain_name(wrapped) == plain


def test_a_compiled_model_has_the_names_of_the_bare_one() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    bare = list(named_trainable(model))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        whole, block = torch.compile(model), torch.compile(model[0])
    assert list(named_trainable(whole)) == bare
    assert [tensor.name for tensor in trainable_tensors(whole)] == bare
    model[0] = block
    assert list(named_trainable(model)) == bare
    assert bare_module(whole) is whole


def test_a_data_parallel_model_has_the_names_of_the_bare_one() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))
    bare = list(named_trainable(model))
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        wrapped = nn.parallel.DistributedDataParallel(model)
        assert bare_module(wrapped) is model
        assert list(named_trainable(wrapped)) == bare
        assert [tensor.name for tensor in trainable_tensors(wrapped)] == bare
    finally:
        distributed.destroy_process_group()


def test_a_tensor_with_two_names_in_one_module_has_both() -> None:
    model = nn.Module()
    model.first = nn.Parameter(torch.ones(2, 2))
    model.second = model.first
    (tensor,) = trainable_tensors(model)
    assert (tensor.name, tensor.aliases) == ("first", ("second",))
