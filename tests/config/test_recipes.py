"""What the recipes that come along, and the defaults, choose: what the field has found to work."""

from __future__ import annotations

from typing import Any

import pytest

from surefoot.config import load_recipe, recipe_names, resolve_settings
from surefoot.config.sections import AdamWSection, SGDSection
from surefoot.config.sections.models import GPTSection, MLPSection, ResNetSection


def recipe(name: str) -> Any:
    return load_recipe(name).recipe


def test_each_recipe_is_looked_at() -> None:
    assert recipe_names() == ("diabetes-mlp", "digits-cnn", "stdlib-gpt")


def test_adamw_is_the_default_and_trains_the_transformer() -> None:
    plain = {"train": {"horizon": "1 epoch", "micro_batch": 1}}
    assert isinstance(resolve_settings(plain).config.optimizer, AdamWSection)
    gpt = recipe("stdlib-gpt")
    assert isinstance(gpt.model, GPTSection)
    assert isinstance(gpt.optimizer, AdamWSection)
    assert gpt.optimizer.weight_decay == 0.1


def test_the_convolutional_network_is_trained_by_sgd_with_momentum() -> None:
    digits = recipe("digits-cnn")
    assert isinstance(digits.model, ResNetSection)
    assert isinstance(digits.optimizer, SGDSection)
    assert (digits.optimizer.momentum, digits.optimizer.nesterov) == (0.9, True)
    assert (digits.optimizer.lr, digits.optimizer.weight_decay) == (0.1, 5e-4)
    assert digits.task.label_smoothing == 0.1


def test_dropout_is_off_where_a_decoder_is_trained_from_scratch() -> None:
    assert GPTSection.model_fields["dropout"].default == 0.0
    assert recipe("stdlib-gpt").model.dropout == 0.0
    perceptron = recipe("diabetes-mlp")
    assert isinstance(perceptron.model, MLPSection)
    assert 0.1 <= perceptron.model.dropout <= 0.3


def test_patience_is_that_of_the_field() -> None:
    assert 5 <= recipe("diabetes-mlp").early_stopping.patience <= 20


@pytest.mark.parametrize("name", recipe_names())
def test_the_norm_is_clipped_at_one(name: str) -> None:
    assert recipe(name).train.clip_norm == 1.0
