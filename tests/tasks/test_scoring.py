"""Scores of some places at a time give the loss of all scores at once, and hold fewer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from parallel.small_runs import settings_of, small_classifier, small_gpt, train
from surefoot.assembly.task_layout import place_task
from surefoot.config.load import resolve_settings
from surefoot.core.errors import RequestError
from surefoot.models.gpt import GPT
from surefoot.tasks.classification import ClassificationTask
from surefoot.tasks.generation import GenerationTask
from surefoot.tasks.scoring import ChunkedScores

WORDS = 512
TASK = GenerationTask(WORDS)


def batch_and_model(dtype: torch.dtype = torch.float64) -> tuple[dict[str, Tensor], GPT]:
    torch.manual_seed(0)
    model = small_gpt(vocabulary_size=WORDS, tied=True).to(dtype)
    ids = torch.randint(WORDS, (6, 10))
    labels = ids.clone()
    labels[::2, 4:7] = -100
    return {"input_ids": ids, "labels": labels}, model


def loss_and_gradients(task: GenerationTask, dtype: torch.dtype) -> tuple[Tensor, list[Tensor]]:
    batch, model = batch_and_model(dtype)
    loss = task.loss_sum(model, batch)
    loss.backward()
    return loss.detach(), [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-13), (torch.float32, 2e-6)])
@pytest.mark.parametrize("rows", [1, 7, 60, 1000])
def test_chunks_give_the_loss_and_the_gradients_of_all(
    rows: int, dtype: torch.dtype, bound: float
) -> None:
    expected_loss, expected = loss_and_gradients(TASK, dtype)
    loss, found = loss_and_gradients(TASK.scored_by(ChunkedScores(rows)), dtype)
    assert loss.dtype == dtype
    torch.testing.assert_close(loss, expected_loss, rtol=bound, atol=0)
    assert len(found) == len(expected)
    for gradient, whole in zip(found, expected, strict=True):
        assert (gradient - whole).norm() <= bound * whole.norm()


def test_metrics_are_those_of_all() -> None:
    batch, model = batch_and_model()
    expected = TASK.metric_sums(model, batch)
    found = TASK.scored_by(ChunkedScores(7)).metric_sums(model, batch)
    assert found.keys() == expected.keys()
    torch.testing.assert_close(found["loss"][0], expected["loss"][0], rtol=1e-13, atol=0)
    assert found["accuracy"] == expected["accuracy"]


def test_half_precision_is_widened_chunk_by_chunk() -> None:
    batch, model = batch_and_model(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        whole = TASK.loss_sum(model, batch)
        loss = TASK.scored_by(ChunkedScores(7)).loss_sum(model, batch)
    loss.backward()
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, whole, rtol=1e-6, atol=0)


class Sizes(TorchDispatchMode):
    """Elements of the largest tensor that is made inside."""

    largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        made = [leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        self.largest = max(self.largest, *made, 0)
        return result


def test_all_scores_are_never_there() -> None:
    batch, model = batch_and_model(torch.float32)
    num_places, weights = batch["input_ids"].numel(), model.head.weight.numel()
    seen = {}
    for name, task in {"whole": TASK, "chunked": TASK.scored_by(ChunkedScores(6))}.items():
        with Sizes() as sizes:
            task.loss_sum(model, batch).backward()
            task.metric_sums(model, batch)
        seen[name] = sizes.largest
    assert seen["whole"] == num_places * WORDS
    # The largest is now the gradient of the output matrix.
    assert seen["chunked"] == weights < seen["whole"]
    print(f"largest tensor: {4 * seen['whole']} bytes whole, {4 * seen['chunked']} in chunks")


def test_a_run_in_chunks_is_the_run() -> None:
    before = train("gpt", settings_of(), 6)
    after = train("gpt", settings_of(memory={"loss": "chunked", "loss_chunk": 7}), 6)
    assert after.losses == pytest.approx(before.losses, rel=1e-12)
    assert after.norms == pytest.approx(before.norms, rel=1e-12)
    assert after.metrics == pytest.approx(before.metrics, rel=1e-12)


def chunked(task: Any, model: Any, **sections: Any) -> Any:
    settings = settings_of(memory={"loss": "chunked"})
    settings["train"] |= sections.get("train", {})
    return place_task(task, model, resolve_settings(settings).config, None)


def test_what_cannot_be_computed_in_chunks_is_refused() -> None:
    with pytest.raises(RequestError, match=r"memory.loss is set, and the task is a Classification"):
        chunked(ClassificationTask(3), small_classifier())
    with pytest.raises(RequestError, match="the forward of a Sequential has no parameter `finish`"):
        chunked(TASK, small_classifier())
    with pytest.raises(RequestError, match=r"train.compile is whole"):
        chunked(TASK, small_gpt(), train={"compile": "whole"})
    scored = chunked(TASK, small_gpt()).scoring
    assert scored == ChunkedScores(2048)
