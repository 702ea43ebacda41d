"""Scores that stay cut over the vocabulary give the loss and the gradients of whole ones."""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from parallel.checks import assert_alike
from parallel.rank_pool import RankPool
from parallel.small_runs import (
    Seen,
    UnevenTexts,
    assembled,
    settings_of,
    small_classifier,
    small_gpt,
    train,
)
from parallel.test_pipeline import all_layers
from parallel.traffic import Traffic
from surefoot.assembly.task_layout import place_task
from surefoot.config.load import resolve_settings
from surefoot.core.errors import RequestError
from surefoot.parallel.mesh import MeshSizes
from surefoot.parallel.vocabulary import (
    vocabulary_parallel_correct_sum,
    vocabulary_parallel_cross_entropy_sum,
)
from surefoot.tasks.classification import ClassificationTask
from surefoot.tasks.generation import GenerationTask
from surefoot.tasks.losses import sequence_cross_entropy_sum
from surefoot.tasks.metrics import correct_sum

DOUBLE, SINGLE = torch.float64, torch.float32
LATER = pytest.mark.ranks_full
WORDS = 24
STYLES: dict[str, dict[str, Any]] = {
    "llama": {"num_kv_heads": 4},
    "gpt2": {
        "norm": "layernorm",
        "activation": "gelu",
        "positions": "learned",
        "tied": True,
        "bias": True,
        "num_kv_heads": 4,
    },
}


def scores_and_words() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    scores = torch.randn(3, 5, WORDS, dtype=DOUBLE, generator=generator)
    scores[0, 0] *= 1e4
    scores[1, 1, 2] = scores[1, 1, 20] = 9.0  # Two words are as likely.
    expected = torch.randint(WORDS, (3, 5), generator=generator)
    expected[1, 1] = 2
    expected[0, 3:] = -100
    return scores, expected


def cut_loss() -> tuple[torch.Tensor, torch.Tensor, int]:
    """The loss, the gradient of this rank's words, and how many are right."""
    scores, expected = scores_and_words()
    group = dist.group.WORLD
    assert group is not None
    own = scores.chunk(group.size(), dim=-1)[dist.get_rank()].clone().requires_grad_()
    loss = vocabulary_parallel_cross_entropy_sum(own, expected, group)
    (3.0 * loss).backward()
    assert own.grad is not None
    return (
        loss.detach(),
        own.grad,
        int(vocabulary_parallel_correct_sum(own.detach(), expected, group)),
    )


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_a_cut_loss_is_the_whole_one(ranks: RankPool, num_ranks: int) -> None:
    scores, expected = scores_and_words()
    scores.requires_grad_()
    loss = sequence_cross_entropy_sum(scores, expected)
    (3.0 * loss).backward()
    found = ranks.run(num_ranks, cut_loss)
    assert all(torch.equal(seen, found[0][0]) for seen, _, _ in found)
    torch.testing.assert_close(found[0][0], loss.detach(), rtol=1e-14, atol=0)
    gradient = torch.cat([own for _, own, _ in found], dim=-1)
    assert scores.grad is not None
    torch.testing.assert_close(gradient, scores.grad, rtol=1e-12, atol=1e-15)
    assert {right for _, _, right in found} == {int(correct_sum(scores, expected))}


@cache
def alone(kind: str, style: str, dtype: torch.dtype) -> Seen:
    return train(kind, settings_of(**sections()), 20, dtype, **STYLES[style])


def sections() -> dict[str, Any]:
    return {
        "ema": {"kind": "on", "decay": 0.8},
        "evaluate": {"micro_batch": 4, "weights": "ema"},
        "log": {"weight_norm_every": "1 steps"},
    }


def train_cut(kind: str, settings: Any, style: str, dtype: torch.dtype) -> Seen:
    return train(kind, settings, 20, dtype, **STYLES[style])


@pytest.mark.parametrize(
    ("num_ranks", "data_ranks", "parallel", "style", "dtype"),
    [
        (2, 1, {"tensor": 2}, "llama", DOUBLE),
        pytest.param(2, 1, {"tensor": 2}, "gpt2", SINGLE, marks=LATER),
        pytest.param(4, 1, {"tensor": 4}, "gpt2", DOUBLE, marks=LATER),
        pytest.param(2, 1, {"tensor": 2, "cut_sequence": True}, "gpt2", DOUBLE, marks=LATER),
        pytest.param(4, 2, {"tensor": 2, "shard": 2}, "gpt2", DOUBLE, marks=LATER),
        pytest.param(4, 2, {"tensor": 2, "replicate": 2}, "llama", DOUBLE, marks=LATER),
        pytest.param(4, 1, {"tensor": 2, "context": 2}, "gpt2", DOUBLE, marks=LATER),
        pytest.param(4, 1, {"tensor": 2, "pipeline": 2}, "llama", DOUBLE, marks=LATER),
    ],
    ids=lambda value: "x".join(value) if isinstance(value, dict) else None,
)
def test_cut_scores_train_as_one_process(
    ranks: RankPool,
    num_ranks: int,
    data_ranks: int,
    parallel: dict[str, Any],
    style: str,
    dtype: torch.dtype,
) -> None:
    settings = settings_of(data_ranks, parallel={**parallel, "cut_logits": True}, **sections())
    found = ranks.run(num_ranks, train_cut, "documents", settings, style, dtype)
    if "pipeline" in parallel:
        found = all_layers(found)
    assert_alike(found, alone("documents", style, dtype), 1e-10 if dtype is DOUBLE else 1e-5)


MANY_WORDS = 4096


def largest_exchange(cut_logits: bool) -> int:
    """Elements of the largest tensor that travels in the forward and backward of a batch."""
    settings = settings_of(parallel={"tensor": 2, "cut_logits": cut_logits})
    assembly = assembled("gpt", settings, vocabulary_size=MANY_WORDS)
    task, model = assembly.evaluator.task, assembly.material.model
    texts = [UnevenTexts()[index] for index in range(4)]
    batch = {name: torch.stack([text[name] for text in texts]) for name in texts[0]}
    with Traffic() as traffic:
        task.loss_sum(model, batch).backward()
        task.metric_sums(model, batch)
    assembly.close()
    return max(traffic.largest.values())


def test_scores_are_never_gathered(ranks: RankPool) -> None:
    num_places = 4 * 10
    whole, cut = ranks.run(2, largest_exchange, False), ranks.run(2, largest_exchange, True)
    assert min(whole) >= num_places * MANY_WORDS
    # What travels is hidden states, and a few numbers a place.
    assert cut == [num_places * small_gpt().config.embedding_dim] * 2


def placed(task: Any, model: Any, sizes: MeshSizes, **sections: Any) -> Any:
    settings = resolve_settings(settings_of(**sections)).config
    mesh: Any = SimpleNamespace(sizes=sizes, rank=0, sum_over_items=None, group=lambda axis: None)
    return place_task(task, model, settings, mesh)


@pytest.mark.parametrize(
    ("sizes", "sections", "what", "remedy"),
    [
        ({"tensor": 2}, {}, "parallel.tensor is 2", "parallel.cut_logits=true"),
        (
            {"tensor": 2},
            {"parallel": {"cut_logits": True}},
            "parallel.cut_logits is true",
            "memory.loss=whole",
        ),
    ],
)
def test_chunks_of_a_cut_layer_are_refused(
    sizes: dict[str, int], sections: dict[str, Any], what: str, remedy: str
) -> None:
    with pytest.raises(RequestError) as refused:
        placed(
            GenerationTask(24),
            small_gpt(),
            MeshSizes(**sizes),
            memory={"loss": "chunked"},
            **sections,
        )
    assert what in str(refused.value) and remedy in str(refused.value)


def test_other_tasks_are_refused() -> None:
    with pytest.raises(RequestError, match="cut_logits is set, and the task is a Classification"):
        placed(
            ClassificationTask(3),
            small_classifier(),
            MeshSizes(tensor=2),
            parallel={"cut_logits": True},
        )
