"""What would train without a word and not as it was meant is refused, and what cannot be kept."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from assembly.parts import INPUTS, TARGETS, assembled, material, settings_of
from surefoot.assembly.checks import check_keepable, check_trainable
from surefoot.core.errors import CheckpointError, ModelError, RequestError


@pytest.mark.parametrize(
    "watcher",
    [{"early_stopping": {"kind": "on"}}, {"schedule": {"kind": "plateau", "patience": 1}}],
)
def test_a_rule_that_watches_a_metric_needs_a_validation_set(watcher: dict[str, Any]) -> None:
    settings = settings_of(**watcher)
    with pytest.raises(RequestError, match="watches a metric"):
        check_trainable(material(), settings)
    check_trainable(material(validation=(INPUTS, TARGETS)), settings)


def test_a_model_in_evaluation_mode_is_refused() -> None:
    with pytest.raises(ModelError, match="evaluation mode"):
        check_trainable(
            material(nn.Sequential(nn.Dropout(), nn.Linear(3, 1)).eval()), settings_of()
        )


def test_a_state_that_no_checkpoint_holds_is_named() -> None:
    assembly = assembled()
    check_keepable(assembly)
    assembly.material.model.register_buffer("held", torch.eye(2).to_sparse())
    with pytest.raises(CheckpointError) as caught:
        check_keepable(assembly)
    assert caught.value.where == "model/held"
