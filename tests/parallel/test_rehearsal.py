"""A layout built in a fake process group holds what the ranks of a real one hold."""

from __future__ import annotations

import json
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch import nn

import surefoot
from parallel.rank_pool import RankPool
from parallel.small_runs import assembled, settings_of, small_gpt
from surefoot.cli import main as command
from surefoot.config.load import resolve_settings
from surefoot.core.errors import EXIT_DONE, EXIT_REQUEST, RequestError
from surefoot.models.gpt import GPT, GPTConfig
from surefoot.parallel.layout import LayoutRequest
from surefoot.parallel.mesh import resolve_sizes
from surefoot.parallel.parts import local_part
from surefoot.parallel.rehearsal import Share, rehearse, sampled_ranks

Capture = pytest.CaptureFixture[str]

SHIPPED = sorted(file.stem for file in (Path(surefoot.__file__).parent / "recipes").glob("*.yaml"))


def rehearsed(
    make_model: Callable[[], nn.Module], ranks: int, only: list[int] | None = None, **axes: Any
) -> list[Share]:
    settings = resolve_settings(settings_of(parallel=axes)).config
    sizes = resolve_sizes(settings.parallel, ranks)
    request = LayoutRequest(settings.parallel, window=8)
    chosen = sampled_ranks(sizes) if only is None else only
    return [rehearse(make_model, request, sizes, settings.optimizer, rank) for rank in chosen]


def eighty_layers() -> GPT:
    """As large as Llama 3 70B."""
    return GPT(
        GPTConfig(
            vocabulary_size=128_256,
            sequence_length=8192,
            num_layers=80,
            num_heads=64,
            num_kv_heads=8,
            embedding_dim=8192,
            feedforward_dim=28_672,
            tied=False,
        )
    )


def test_eighty_layers_on_1024_ranks() -> None:
    shares = rehearsed(eighty_layers, 1024, pipeline=4, shard=32, tensor=8)
    assert [share.rank for share in shares] == [0, 255, 256, 511, 512, 767, 768, 1023]
    assert not dist.is_initialized()
    first, last = shares[0], shares[-1]
    # 32 shards of an eighth: of 28,672 hidden units 3,584 stand on a rank, in rows of 112.
    assert first.shapes["blocks.0.feedforward.input.weight"] == (28_672 // 8 // 32, 8192)
    assert first.shapes["blocks.19.attention.key.weight"] == (8 * 128 // 8 // 32, 8192)
    assert first.shapes["blocks.0.attention.output.weight"] == (8192 // 32, 8192 // 8)
    assert "blocks.20.attention.key.weight" not in first.shapes
    assert "head.weight" not in first.shapes
    assert last.shapes["head.weight"] == (128_256 // 8 // 32 + 0, 8192)
    assert last.coordinates == {"pipeline": 3, "shard": 31, "tensor": 7}
    # Matrices divide evenly: the bytes of a block, over 32 x 8 ranks, and its norms over 32.
    block = 2 * 8192 * 8192 + 2 * 1024 * 8192 + 3 * 28_672 * 8192
    of_stage = 20 * (block // 256 + 2 * 8192 // 32) * 4
    assert shares[2].parameter_bytes == shares[2].gradient_bytes == of_stage
    assert shares[2].optimizer_bytes == 2 * of_stage
    assert first.parameter_bytes == of_stage + 128_256 * 8192 // 256 * 4
    # Two blocks at a time are whole, apart from the tensor axis.
    whole = (block // 8 + 2 * 8192) * 4
    assert shares[2].gathered_bytes == 2 * (whole - whole // 32)


@pytest.mark.parametrize(
    ("axes", "named"),
    [
        ({"tensor": 16, "shard": 64}, "num_kv_heads = 8"),
        ({"pipeline": 128, "shard": 8, "pipeline_schedule": "gpipe"}, "80"),
        ({"pipeline": 3, "shard": 8}, "does not make 1024 ranks"),
    ],
)
def test_what_does_not_fit_is_refused_as_on_real_ranks(axes: dict[str, Any], named: str) -> None:
    with pytest.raises(RequestError, match=named) as caught:
        rehearsed(eighty_layers, 1024, **axes)
    assert caught.value.remedy
    assert not dist.is_initialized()


def local_shapes(axes: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    assembly = assembled("gpt", settings_of(parallel=axes))
    model = assembly.material.model
    assembly.close()
    return {name: tuple(local_part(p).shape) for name, p in model.named_parameters()}


@pytest.mark.parametrize(
    "axes",
    [
        {"shard": 2, "tensor": 2},
        pytest.param({"shard": 4}, marks=pytest.mark.ranks_full),
        pytest.param({"replicate": 2, "tensor": 2}, marks=pytest.mark.ranks_full),
        pytest.param({"pipeline": 2, "shard": 2}, marks=pytest.mark.ranks_full),
    ],
)
def test_ranks_hold_what_was_rehearsed(ranks: RankPool, axes: dict[str, int]) -> None:
    shares = rehearsed(small_gpt, 4, [0, 1, 2, 3], **axes)
    assert [share.shapes for share in shares] == ranks.run(4, local_shapes, axes)
    # Together they hold each parameter as often as there are copies.
    elements = sum(prod(shape) for share in shares for shape in share.shapes.values())
    whole = sum(parameter.numel() for parameter in small_gpt().parameters())
    if "tensor" not in axes:
        assert elements == whole


def test_the_command_shows_it(capsys: Capture) -> None:
    words = ["show", "layout", "diabetes-mlp", "--ranks", "64", "--set", "parallel.shard=8"]
    assert command.invoke([*words, "--json", "-"]) == EXIT_DONE
    answer = json.loads(capsys.readouterr().out)
    assert (answer["ranks"], answer["bubble_fraction"]) == (64, None)
    assert [row[:2] for row in answer["axes"]] == [["replicate", 8], ["shard", 8]]
    assert [share["rank"] for share in answer["shares"]] == [0, 63]


@pytest.mark.parametrize("recipe", SHIPPED)
def test_plain_copies_of_every_shipped_recipe_are_shown(recipe: str, capsys: Capture) -> None:
    assert command.invoke(["show", "layout", recipe, "--ranks", "2", "--json", "-"]) == EXIT_DONE
    answer = json.loads(capsys.readouterr().out)
    assert [row[:2] for row in answer["axes"]] == [["replicate", 2]]
    assert all(share["parameter_bytes"] == 4 * answer["parameters"] for share in answer["shares"])


def test_a_mesh_that_makes_other_ranks_is_refused_by_the_command(capsys: Capture) -> None:
    words = ["show", "layout", "diabetes-mlp", "--ranks", "6", "--set", "parallel.shard=4"]
    assert command.invoke(words) == EXIT_REQUEST
    assert "6 ranks" in capsys.readouterr().err
