"""The plan for transformers' families: Llama, Qwen and Mistral cut in two train as one does."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import pytest
import torch

from parallel.rank_pool import CaseFailed, RankPool
from parallel.small_runs import VOCABULARY, Recorder, UnevenTexts, settings_of
from surefoot.assembly.process import prepare_process
from surefoot.assembly.run_parts import Material, assemble
from surefoot.config.load import resolve_settings
from surefoot.core.plans import LLAMA_PLAN, plan_for
from surefoot.data.order import Cursor
from surefoot.data.sources.datasets import as_source
from surefoot.parallel.tensor import layers_of
from surefoot.tasks.generation import GenerationTask

transformers = pytest.importorskip("transformers")
FAMILIES = ("Llama", "Qwen2", "Qwen3", "Mistral")


def made(family: str) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        family.lower(),
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=4,
        max_position_embeddings=16,
        tie_word_embeddings=family == "Qwen2",
    )
    return AutoModelForCausalLM.from_config(config, dtype=torch.float64)


def losses(family: str, parallel: dict[str, Any]) -> tuple[list[float], list[float]]:
    """Losses and gradient norms of a few updates."""
    settings = resolve_settings(settings_of(parallel=parallel)).config
    process = prepare_process(settings)
    material = Material(made(family), GenerationTask(VOCABULARY), as_source(UnevenTexts(), "texts"))
    assembly = assemble(material, settings, process)
    recorder = Recorder()
    update = assembly.make_update((recorder,))
    with closing(assembly.open_windows(Cursor())) as windows:
        for _ in range(5):
            update(next(windows))
        update.parts.log.settle()
    assembly.close()
    return [r.loss for r in recorder.reports], [r.grad_norm for r in recorder.reports]


@pytest.mark.parametrize(
    "family",
    [pytest.param(f, marks=[] if f == "Qwen3" else pytest.mark.ranks_full) for f in FAMILIES],
)
def test_a_foreign_family_in_two_parts(ranks: RankPool, family: str) -> None:
    expected = losses(family, {})
    for found in ranks.run(2, losses, family, {"tensor": 2}):
        assert found[0] == pytest.approx(expected[0], rel=1e-10)
        assert found[1] == pytest.approx(expected[1], rel=1e-9)


@pytest.mark.ranks_full
@pytest.mark.parametrize("family", ["Llama", "Qwen2"])
def test_their_scores_may_stay_cut(ranks: RankPool, family: str) -> None:
    expected = losses(family, {})
    for found in ranks.run(2, losses, family, {"tensor": 2, "cut_logits": True}):
        assert found[0] == pytest.approx(expected[0], rel=1e-10)
        assert found[1] == pytest.approx(expected[1], rel=1e-9)


@pytest.mark.ranks_full
def test_their_sequence_stays_whole(ranks: RankPool) -> None:
    with pytest.raises(CaseFailed) as failed:
        ranks.run(2, losses, "Llama", {"tensor": 2, "cut_sequence": True})
    assert "a LlamaForCausalLM does not support sequence parallelism" in str(failed.value.error)


def test_every_layer_of_a_family_is_known() -> None:
    for family in FAMILIES:
        assert plan_for(name for name, _ in layers_of(made(family))) is LLAMA_PLAN


@pytest.mark.ranks_full
@pytest.mark.parametrize(
    ("family", "parallel"),
    [
        ("Llama", {"pipeline": 2}),
        ("Mistral", {"pipeline": 2, "pipeline_schedule": "zero-bubble"}),
        ("Qwen3", {"pipeline": 2, "pipeline_schedule": "gpipe"}),
        ("Llama", {"pipeline": 2, "tensor": 2}),
    ],
)
def test_a_foreign_family_in_two_stages(
    ranks: RankPool, family: str, parallel: dict[str, Any]
) -> None:
    expected = losses(family, {})
    for found in ranks.run(2 * parallel.get("tensor", 1), losses, family, parallel):
        assert found[0] == pytest.approx(expected[0], rel=1e-10)
        assert found[1] == pytest.approx(expected[1], rel=1e-9)
