"""Saved by 1, 2 or 4 ranks, gone on with by 1, 2, 3 or 4: the same weights, the same samples."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from parallel.rank_pool import RankPool
from parallel.small_runs import NUM_SAMPLES, WINDOW, assembled, settings_of, whole
from surefoot.data.order import Cursor
from surefoot.state.checkpoint import newest_whole, write_checkpoint

SAVED_AFTER, UNTIL = 5, 11
"""An epoch is four updates, of which the last takes one sample: both stretches cross its end."""
MICRO_BATCHES = {1: (4, 3), 2: (2, 3), 3: (2, 2), 4: (1, 3)}
"""Micro-batch and window length of each number of ranks: always 12 samples an update."""


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankPool]:
    pool = RankPool(4)
    yield pool
    pool.close()


@dataclass
class Stretch:
    """What one rank saw."""

    weights_before: dict[str, Tensor]
    weights_after: dict[str, Tensor]
    optimizer_before: list[Tensor]
    optimizer_after: list[Tensor]
    sample_ids: list[tuple[int, ...]]
    """Of this rank, for each update."""
    counts: list[tuple[int, int, int]]


def settings_for(num_ranks: int, sharded: bool) -> dict[str, Any]:
    settings = settings_of()
    micro_batch, accumulation = MICRO_BATCHES[num_ranks]
    settings["train"] |= {"micro_batch": micro_batch, "accumulation": accumulation}
    if sharded and num_ranks > 1:
        settings["parallel"] = {"shard": num_ranks}
    return settings


def moments(trainable: Any) -> list[Tensor]:
    state = trainable.state.optimizer.state_by_name()["parameters"]
    return [
        whole(value)
        for _, of_parameter in sorted(state.items())
        for _, value in sorted(of_parameter.items())
        if isinstance(value, Tensor)
    ]


def weights(trainable: Any) -> dict[str, Tensor]:
    return {name: whole(value) for name, value in trainable.state.model.state_dict().items()}


def stretch(settings: dict[str, Any], folder: str, until: int, resume: bool) -> Stretch:
    """Trains up to an update, and saves there where the run begins."""
    assembly = assembled("gpt", settings)
    trainable, at, update = assembly.trainable, assembly.place.ranks, assembly.make_update()
    if resume:
        _, _, snapshot, refused = newest_whole(Path(folder), at)
        assert not refused
        trainable.state.restore(snapshot)
    seen = Stretch(weights(trainable), {}, moments(trainable) if resume else [], [], [], [])
    progress = trainable.state.progress
    start = progress.cursor if resume else Cursor()
    with closing(assembly.open_windows(start)) as windows:
        while update.parts.log.settle() < until:
            window = next(windows)
            seen.sample_ids.append(window.sample_ids)
            update(window)
            update.parts.log.settle()
            seen.counts.append((progress.step, progress.samples, progress.tokens))
    seen.weights_after, seen.optimizer_after = weights(trainable), moments(trainable)
    if not resume:
        snapshot = trainable.state.capture(metrics=0)
        write_checkpoint(Path(folder), until, snapshot, {}, ranks=at)
    assembly.close()
    return seen


def global_ids(found: list[Stretch]) -> list[list[int]]:
    """The samples of each update over all ranks."""
    return [
        sorted(i for of_rank in update for i in of_rank)
        for update in zip(*(seen.sample_ids for seen in found), strict=True)
    ]


@cache
def uninterrupted() -> Stretch:
    with tempfile.TemporaryDirectory() as folder:
        return stretch(settings_for(1, False), folder, UNTIL, resume=False)


@pytest.mark.parametrize("sharded", [False, True], ids=["replicas", "shards"])
@pytest.mark.parametrize("saved_by", [1, 2, 4])
def test_every_number_of_ranks_goes_on_where_another_has_saved(
    ranks: RankPool, tmp_path: Path, saved_by: int, sharded: bool
) -> None:
    torch.set_num_threads(1)
    expected, folder = uninterrupted(), str(tmp_path)
    writing = settings_for(saved_by, sharded)
    saved = ranks.run(saved_by, stretch, writing, folder, SAVED_AFTER, False)
    assert global_ids(saved) == global_ids([expected])[:SAVED_AFTER]
    for read_by in MICRO_BATCHES:
        found = ranks.run(read_by, stretch, settings_for(read_by, sharded), folder, UNTIL, True)
        for seen in found:
            # What is read is what was written, to the bit.
            assert seen.weights_before.keys() == saved[0].weights_after.keys()
            for name, weight in seen.weights_before.items():
                assert torch.equal(weight, saved[0].weights_after[name]), name
            before = zip(seen.optimizer_before, saved[0].optimizer_after, strict=True)
            assert all(torch.equal(mine, theirs) for mine, theirs in before)
            assert seen.counts == expected.counts[SAVED_AFTER:]
            for name, weight in seen.weights_after.items():
                torch.testing.assert_close(
                    weight, expected.weights_after[name], rtol=1e-9, atol=1e-11
                )
        assert global_ids(found) == global_ids([expected])[SAVED_AFTER:]
    assert sorted(i for ids in global_ids(saved)[:4] for i in ids) == list(range(NUM_SAMPLES))
    assert len(global_ids(saved)[0]) == WINDOW
