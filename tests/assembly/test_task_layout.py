"""A task is computed in another way only where the settings ask for it and it can be."""

from __future__ import annotations

import pytest
from torch import nn

from assembly.parts import material, settings_of
from parallel.small_runs import VOCABULARY, small_gpt
from surefoot.assembly.task_layout import loads_of, place_task, weight_of
from surefoot.core.errors import RequestError
from surefoot.tasks.generation import GenerationTask

CHUNKED = settings_of(memory={"loss": "chunked"})


def test_without_anything_asked_for_it_is_the_task_itself() -> None:
    task = material().task
    assert place_task(task, nn.Linear(3, 1), settings_of(), None) is task
    assert loads_of(task) is None and weight_of(task, task) == task.weight


def test_chunks_are_for_next_tokens_and_models_that_take_them() -> None:
    placed = place_task(GenerationTask(VOCABULARY), small_gpt(), CHUNKED, None)
    assert isinstance(placed, GenerationTask)
    with pytest.raises(RequestError, match=r"memory\.loss is set"):
        place_task(material().task, nn.Linear(3, 1), CHUNKED, None)
    with pytest.raises(RequestError, match="no parameter `finish`"):
        place_task(GenerationTask(VOCABULARY), nn.Linear(3, 1), CHUNKED, None)


def test_a_model_with_experts_adds_the_terms_of_its_routers() -> None:
    model = small_gpt(experts={"num_experts": 4, "balance_weight": 0.1})
    task = GenerationTask(VOCABULARY)
    placed = place_task(task, model, settings_of(train={"compile": "off"}), None)
    assert placed is not task and loads_of(placed) is not None
    assert weight_of(task, placed) != task.weight
