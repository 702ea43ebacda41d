"""How batches reach models and scores come back."""

from __future__ import annotations

from collections import OrderedDict, UserDict, namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from surefoot.core.errors import DataError, ModelError
from surefoot.tasks.calling import (
    call_model,
    logits_of,
    plan_call,
    signature_of,
    target_mask_of,
    target_of,
)

ONE, TWO, TARGET = torch.tensor([1.0]), torch.tensor([2.0]), torch.tensor([3])


class Recorder(nn.Module):
    """Base of models that return what they were given. Abstract."""

    def forward(self, *arguments: Any, **named: Any) -> Any:
        return arguments, named


class Plain(nn.Module):
    def forward(self, x):
        return {"x": x}


class Two(nn.Module):
    def forward(self, left, right=None, *, scale=1.0):
        return {"left": left, "right": right, "scale": scale}


class OwnLoss(nn.Module):
    def forward(self, input_ids, attention_mask=None, labels=None, use_cache=True, **kwargs):
        return {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "labels": labels,
            "use_cache": use_cache,
            **kwargs,
        }


class OnlyPositional(nn.Module):
    def forward(self, x, /):
        return {"x": x}


@dataclass
class Named:
    left: Tensor
    target: Tensor
    right: Tensor | None = None


Pair = namedtuple("Pair", ["left", "label"])


@pytest.mark.parametrize(
    ("model", "batch", "expected"),
    [
        (Plain(), (ONE, TARGET), {"x": ONE}),
        (Plain(), [ONE, TARGET], {"x": ONE}),
        (Plain(), (ONE,), {"x": ONE}),
        (Plain(), ONE, {"x": ONE}),
        (Plain(), {"x": ONE, "label": TARGET, "name": "a"}, {"x": ONE}),
        (Plain(), {"picture": ONE, "y": TARGET}, {"x": ONE}),
        (Plain(), ({"x": ONE}, TARGET), {"x": ONE}),
        (OnlyPositional(), {"x": ONE, "y": TARGET}, {"x": ONE}),
        (Two(), (ONE, TWO, TARGET), {"left": ONE, "right": TWO, "scale": 1.0}),
        (Two(), Named(ONE, TARGET), {"left": ONE, "right": None, "scale": 1.0}),
        (Two(), Named(ONE, TARGET, TWO), {"left": ONE, "right": TWO, "scale": 1.0}),
        (Two(), Pair(ONE, TARGET), {"left": ONE, "right": None, "scale": 1.0}),
        (Two(), UserDict(left=ONE, right=TWO), {"left": ONE, "right": TWO, "scale": 1.0}),
        (
            OwnLoss(),
            {"input_ids": ONE, "attention_mask": TWO, "labels": TARGET, "extra": ONE},
            {"input_ids": ONE, "attention_mask": TWO, "labels": None, "use_cache": True},
        ),
    ],
)
def test_inputs_reach_forward(model, batch, expected):
    assert call_model(model, batch) == expected


def test_a_forward_without_names_gets_all_but_the_target():
    arguments, named = call_model(Recorder(), {"a": ONE, "b": TWO, "labels": TARGET})
    assert (arguments, named) == ((), {"a": ONE, "b": TWO})
    assert call_model(Recorder(), (ONE, TWO, TARGET)) == ((ONE, TWO), {})


def test_settings_reach_only_a_forward_that_names_them():
    batch = {"input_ids": ONE}
    assert call_model(OwnLoss(), batch, use_cache=False)["use_cache"] is False
    assert call_model(Plain(), {"x": ONE}, use_cache=False) == {"x": ONE}
    assert call_model(Recorder(), batch, use_cache=False) == ((), batch)
    assert call_model(OwnLoss(), (ONE, TARGET), use_cache=False)["use_cache"] is False


def test_wrappers_are_seen_through():
    class Wrapper(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.module = inner

        def forward(self, *inputs, **kwargs):
            return self.module(*inputs, **kwargs)

    batch = {"input_ids": ONE, "labels": TARGET, "extra": ONE}
    assert "extra" not in call_model(Wrapper(OwnLoss()), batch)
    compiled = torch.compile(Wrapper(OwnLoss()), backend="eager")
    assert signature_of(compiled) == signature_of(OwnLoss())
    assert signature_of(compiled) is signature_of(compiled)


def test_a_model_that_happens_to_hold_a_module_is_itself():
    class Holder(nn.Module):
        def __init__(self):
            super().__init__()
            self.module = OwnLoss()

        def forward(self, picture):
            return picture

    assert signature_of(Holder()).names == ("picture",)


def test_the_plan_says_what_is_left_over():
    plan = plan_call(OwnLoss(), {"input_ids": ONE, "labels": TARGET, "document_ids": TWO})
    assert plan.passed == ("input_ids",)
    assert plan.unused == ("document_ids",)
    assert plan.accepted == ("input_ids", "attention_mask", "labels", "use_cache")
    assert plan_call(Plain(), {"picture": ONE, "y": TARGET}).passed == ("picture",)
    assert plan_call(Two(), (ONE, TWO, TARGET)).passed == ("input 0", "input 1")


@pytest.mark.parametrize(
    ("model", "batch", "present"),
    [
        (Plain(), {"a": ONE, "b": TWO}, "['a', 'b']"),
        (Two(), {"right": ONE}, "['right']"),
        (OwnLoss(), {"labels": TARGET}, "[]"),
        (Plain(), Named(ONE, TARGET, TWO), "['left', 'right']"),
    ],
)
def test_a_batch_that_does_not_fit_is_named(model, batch, present):
    with pytest.raises(ModelError) as caught:
        call_model(model, batch)
    assert present in caught.value.what
    assert str(list(signature_of(model).required)) in caught.value.what
    assert str(list(signature_of(model).names)) in caught.value.where
    with pytest.raises(ModelError):
        plan_call(model, batch)


@pytest.mark.parametrize(("model", "inputs"), [(Plain(), 2), (Two(), 3)])
def test_too_many_inputs_are_named(model, inputs):
    with pytest.raises(ModelError, match=f"gives {inputs} inputs"):
        call_model(model, (*[ONE] * inputs, TARGET))


def test_too_few_inputs_are_named():
    class Needs(nn.Module):
        def forward(self, left, right):
            return left

    for use in (call_model, plan_call):
        with pytest.raises(ModelError, match=r"gives 1 input by position; Needs.forward needs"):
            use(Needs(), (ONE, TARGET))
        with pytest.raises(ModelError, match=r"needs \['left', 'right'\]; the batch has \['x'\]"):
            use(Needs(), {"x": ONE, "y": TARGET})


@pytest.mark.parametrize("batch", ["text", (), 3, None])
def test_a_batch_without_inputs_is_refused(batch):
    with pytest.raises(DataError, match="holds no inputs"):
        call_model(Plain(), batch)


@pytest.mark.parametrize(
    "batch",
    [
        (ONE, TARGET),
        [ONE, TWO, TARGET],
        {"x": ONE, "labels": TARGET},
        {"x": ONE, "y": TARGET},
        {"x": ONE, "label": TARGET, "y": ONE},
        {"x": ONE, "labels": None, "target": TARGET},
        Named(ONE, TARGET),
        Pair(ONE, TARGET),
    ],
)
def test_the_target_is_found(batch):
    assert target_of(batch) is TARGET


@pytest.mark.parametrize(
    ("batch", "found"),
    [
        (ONE, "no target"),
        ((ONE,), "no target"),
        ({"x": ONE}, r"dict with \['x'\]"),
        ((ONE, 3), "target that is a int"),
    ],
)
def test_a_missing_target_is_named(batch, found):
    with pytest.raises(DataError, match=found):
        target_of(batch)


def test_the_mask_is_found():
    mask = torch.tensor([1, 0])
    assert target_mask_of({"x": ONE, "target_mask": mask}).tolist() == [True, False]
    assert target_mask_of((ONE, TARGET)) is None
    assert target_mask_of({"x": ONE}) is None
    assert call_model(Plain(), {"picture": ONE, "target_mask": mask}) == {"x": ONE}


@dataclass
class Output:
    logits: Tensor


class FakeModelOutput(OrderedDict):
    """Like transformers' outputs: a mapping and an object at once."""

    @property
    def logits(self):
        return self["logits"]


@pytest.mark.parametrize(
    "output",
    [
        ONE,
        (ONE, TWO),
        [ONE],
        {"loss": torch.tensor(0.0), "logits": ONE},
        Output(ONE),
        FakeModelOutput(logits=ONE),
        namedtuple("Scores", ["hidden", "logits"])(TWO, ONE),
    ],
)
def test_scores_are_found(output):
    assert logits_of(output) is ONE


@pytest.mark.parametrize(
    ("output", "message"),
    [
        (torch.tensor(1.0), "returned a scalar"),
        ((torch.tensor(1.0), ONE), "returned a scalar"),
        ({"loss": ONE}, r"dict with \['loss'\]"),
        ((), "no scores"),
        (None, "NoneType"),
        (("text",), "no scores"),
    ],
)
def test_missing_scores_are_named(output, message):
    with pytest.raises(ModelError, match=message):
        logits_of(output)


class Masked(nn.Module):
    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return input_ids * attention_mask


def test_a_mask_that_is_missing_names_padding():
    with pytest.raises(ModelError, match="needs") as caught:
        call_model(Masked(), {"input_ids": torch.zeros(2, 3)})
    assert "PaddingCollate" in caught.value.remedy
