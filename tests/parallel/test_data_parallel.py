"""Replicas train as one process does: the same losses, norms, counts, weights and metrics."""

from __future__ import annotations

from contextlib import closing
from functools import cache, wraps
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.backends.distributed import DDPOptimizer

from parallel.checks import assert_alike
from parallel.rank_pool import CaseFailed, RankPool
from parallel.small_runs import Pictures, Recorder, Seen, assembled, settings_of, train
from surefoot.assembly.process import prepare_process
from surefoot.assembly.run_parts import Material, assemble
from surefoot.config.load import resolve_settings
from surefoot.core.errors import ModelError
from surefoot.data.order import Cursor
from surefoot.data.sources.datasets import as_source
from surefoot.parallel import data_parallel
from surefoot.tasks.classification import ClassificationTask

DOUBLE, SINGLE = torch.float64, torch.float32


@cache
def alone(kind: str, dtype: torch.dtype) -> Seen:
    return train(kind, settings_of(), dtype=dtype)


@pytest.mark.parametrize(("dtype", "rtol"), [(DOUBLE, 1e-10), (SINGLE, 1e-5)])
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_replicas_train_as_one_process(
    ranks: RankPool, num_ranks: int, dtype: torch.dtype, rtol: float
) -> None:
    settings = settings_of(num_ranks)
    found = ranks.run(num_ranks, train, "gpt", settings, 20, dtype)
    assert_alike(found, alone("gpt", dtype), rtol)


def layouts_of_buckets() -> list[list[tuple[int, ...]]]:
    """Shapes of the gradients in their buckets, for each of three windows."""
    seen: list[tuple[int, ...]] = []
    sum_gradients = data_parallel.sum_gradients

    @wraps(sum_gradients)
    def recorded(state: Any, bucket: Any) -> Any:
        seen.extend(tuple(parameter.shape) for parameter in bucket.parameters())
        return sum_gradients(state, bucket)

    data_parallel.sum_gradients = recorded
    try:
        assembly = assembled("pictures", settings_of(2))
    finally:
        data_parallel.sum_gradients = sum_gradients
    found, update = [], assembly.make_update()
    with closing(assembly.open_windows(Cursor())) as windows:
        for _ in range(3):
            seen.clear()
            update(next(windows))
            found.append(list(seen))
    assembly.close()
    return found


def test_the_first_window_of_a_process_adds_up_as_all_others(ranks: RankPool) -> None:
    first, *later = ranks.run(2, layouts_of_buckets)[0]
    assert len(first) == 6 and later == [first, first]


@pytest.mark.ranks_full
def test_chunks_of_scores_train_as_one_process(ranks: RankPool) -> None:
    settings = settings_of(2, memory={"loss": "chunked", "loss_chunk": 7})
    found = ranks.run(2, train, "gpt", settings, 20, DOUBLE)
    assert_alike(found, alone("gpt", DOUBLE), 1e-10)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("micro_batch", [3, 5])
def test_metrics_are_those_of_one_process(
    ranks: RankPool, num_ranks: int, micro_batch: int
) -> None:
    settings: dict[str, Any] = settings_of(evaluate={"micro_batch": micro_batch})
    expected = train("gpt", settings_of(), 0).metrics
    for seen in ranks.run(num_ranks, train, "gpt", settings, 0):
        assert seen.metrics == pytest.approx(expected, rel=1e-12)
    assert expected["samples"] == 37


class PartlyIdle(nn.Module):
    """Uses its second layer for some inputs only; the third never."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 3) for _ in range(3))

    def forward(self, inputs: Tensor) -> Tensor:
        first = self.layers[0](inputs)
        chosen = inputs[:, :1] > 1.0
        return first + chosen * self.layers[1](inputs) if bool(chosen.any()) else first


def train_partly_idle(choice: str, data_ranks: int) -> list[float]:
    settings = settings_of(data_ranks, parallel={"unused_parameters": choice})
    resolved = resolve_settings(settings).config
    process = prepare_process(resolved)
    data = as_source(Pictures(), "points")
    assembly = assemble(Material(PartlyIdle(), ClassificationTask(3), data), resolved, process)
    recorder = Recorder()
    update = assembly.make_update((recorder,))
    with closing(assembly.open_windows(Cursor())) as windows:
        for _ in range(8):
            update(next(windows))
        update.parts.log.settle()
    assembly.close()
    return [report.loss for report in recorder.reports]


def test_a_parameter_that_takes_no_part_is_named(ranks: RankPool) -> None:
    with pytest.raises(CaseFailed) as failed:
        ranks.run(2, train_partly_idle, "refuse", 2)
    assert isinstance(failed.value.error, ModelError)
    assert "layers.2.weight" in str(failed.value.error)


def test_or_looked_for(ranks: RankPool) -> None:
    expected = train_partly_idle("refuse", 1)
    for found in ranks.run(2, train_partly_idle, "find", 2):
        assert found == pytest.approx(expected, rel=1e-5)


def compiled_blocks() -> tuple[Seen, int]:
    """What a run with compiled blocks shows, and how many graphs torch has cut for replicas."""
    cut = 0
    compile_fn = DDPOptimizer.compile_fn

    def counted(*arguments: Any, **options: Any) -> Any:
        nonlocal cut
        cut += 1
        return compile_fn(*arguments, **options)

    DDPOptimizer.compile_fn = counted
    try:
        settings = settings_of(2)
        settings["train"]["compile"] = "blocks"
        return train("gpt", settings, 20, DOUBLE), cut
    finally:
        DDPOptimizer.compile_fn = compile_fn


@pytest.mark.ranks_full
def test_compiled_blocks_stay_whole(ranks: RankPool) -> None:
    found = ranks.run(2, compiled_blocks)
    assert_alike([seen for seen, _ in found], alone("gpt", DOUBLE), 1e-10)
    assert [cut for _, cut in found] == [0, 0]
