"""Sections of a recipe become data, task and model; the user's own is imported by name."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from surefoot.assembly.material import (
    build_model,
    freeze,
    prepare_material,
    refuse_other_than_modules,
    resolve_architecture,
)
from surefoot.config.load import load_recipe
from surefoot.core.errors import ModelError, RequestError


def test_a_recipe_becomes_what_is_trained_on_what() -> None:
    recipe = load_recipe("diabetes-mlp").recipe
    prepared = prepare_material(recipe)
    sets = prepared.fingerprints()
    assert set(sets) == {"train", "validation"} and len(set(sets.values())) == 2
    assert prepared.architecture is not None and prepared.architecture["in_features"] == 10
    twin = build_model(prepared.architecture)
    shapes = {name: p.shape for name, p in prepared.material.model.named_parameters()}
    assert {name: p.shape for name, p in twin.named_parameters()} == shapes


def test_a_size_that_the_data_does_not_give_is_named() -> None:
    recipe = load_recipe("diabetes-mlp").recipe
    with pytest.raises(ModelError, match="does not give 'in_features'"):
        resolve_architecture(recipe, {})


def test_frozen_parameters_are_those_whose_names_match() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    freeze(model, ("0.*",))
    assert [p.requires_grad for p in model.parameters()] == [False, False, True, True]
    with pytest.raises(ModelError, match="no parameter matches"):
        freeze(model, ("head.*",))


def not_declared(size: int) -> object:
    return nn.Linear(size, 1)


def declared(size: int) -> nn.Module:
    return nn.Linear(size, 1)


def test_a_checkpoint_names_only_what_says_that_it_makes_a_module() -> None:
    for name in ("declared", "nn.Linear"):
        refuse_other_than_modules({"kind": "custom", "target": f"{__name__}:{name}"})
    for name in ("not_declared", "torch.manual_seed"):
        with pytest.raises(RequestError, match="not declared to be a module"):
            refuse_other_than_modules({"kind": "custom", "target": f"{__name__}:{name}"})
    assert isinstance(torch.manual_seed(0), torch.Generator)
