"""Cross-field rules: each is broken by its cases here, and by nothing that only looks like it."""

from __future__ import annotations

from typing import Any

import pytest

from config.recipes_for_tests import GPT, IMAGES, changed
from surefoot.config import resolve_recipe, resolve_settings
from surefoot.config.rules import RULES, broken_rules
from surefoot.config.sections import Recipe
from surefoot.core.errors import ConfigError

BASES = {"gpt": GPT, "images": IMAGES}
TIME = {"train.horizon": "10 min"}
FIXED = {**TIME, "schedule": {"kind": "constant"}}
SGD = {"kind": "sgd", "lr": 0.1}
ONE_CYCLE = {"kind": "one_cycle"}
PLATEAU = {"kind": "plateau"}
STOPPING = {"kind": "on"}
DIABETES = {
    "model": {"kind": "mlp", "hidden": [8]},
    "data": {"kind": "diabetes"},
    "task": {"kind": "regression"},
}

CONTRACT = {"kind": "research", "task": "write text"}
SLICE = {"metric": "validation/loss", "direction": "min"}
CANDIDATE = {
    **CONTRACT,
    "kind": "production_candidate",
    "target": 2,
    "baseline": "runs/before",
    "slices": [SLICE],
}

# rule, base, what is changed, the keys that are named
BROKEN: list[tuple[str, str, dict[str, Any], set[str]]] = [
    (
        "decay_to_the_end_needs_a_horizon_in_updates",
        "gpt",
        {**TIME, "schedule": {"kind": "warmup_cosine", "warmup": 5}},
        {"schedule.total"},
    ),
    (
        "decay_to_the_end_needs_a_horizon_in_updates",
        "gpt",
        {**TIME, "schedule": {"kind": "warmup_linear", "warmup": 5}},
        {"schedule.total"},
    ),
    (
        "decay_to_the_end_needs_a_horizon_in_updates",
        "gpt",
        {**TIME, "schedule": {"kind": "one_cycle", "rise": 5}},
        {"schedule.total"},
    ),
    (
        "decay_to_the_end_needs_a_horizon_in_updates",
        "gpt",
        {**TIME, "schedule": {"kind": "wsd", "warmup": 5, "cooldown": 50}},
        {"schedule.cooldown_start"},
    ),
    (
        "decay_to_the_end_needs_a_horizon_in_updates",
        "gpt",
        {**TIME, "schedule": {"kind": "constant_cooldown", "cooldown": 50}},
        {"schedule.cooldown_start"},
    ),
    (
        "share_needs_a_horizon_in_updates",
        "gpt",
        {**TIME, "schedule": {"kind": "warmup_cosine", "total": 500, "warmup": 0.1}},
        {"schedule.warmup"},
    ),
    (
        "share_needs_a_horizon_in_updates",
        "gpt",
        {**TIME, "schedule": {"kind": "multi_step", "milestones": [0.5, 0.8]}},
        {"schedule.milestones.0", "schedule.milestones.1"},
    ),
    ("warmup_ends_within_the_run", "gpt", {"schedule.warmup": "201 steps"}, {"schedule.warmup"}),
    (
        "warmup_ends_within_the_run",
        "gpt",
        {"schedule": {"kind": "warmup_cosine", "warmup": 60, "total": 50}},
        {"schedule.warmup"},
    ),
    (
        "warmup_ends_within_the_run",
        "gpt",
        {"train.horizon": "1M tokens", "schedule.warmup": "2M tokens"},
        {"schedule.warmup"},
    ),
    (
        "inverse_sqrt_needs_a_warmup",
        "gpt",
        {"schedule": {"kind": "inverse_sqrt", "warmup": 0}},
        {"schedule.warmup"},
    ),
    (
        "milestones_rise",
        "gpt",
        {"schedule": {"kind": "multi_step", "milestones": [30, 30, 20]}},
        {"schedule.milestones.1", "schedule.milestones.2"},
    ),
    (
        "milestones_rise",
        "gpt",
        {"schedule": {"kind": "multi_step", "milestones": ["30 steps", "2 epochs"]}},
        {"schedule.milestones.1"},
    ),
    (
        "cooldown_fits",
        "gpt",
        {"schedule": {"kind": "wsd", "cooldown_start": 50}},
        {"schedule.cooldown_start"},
    ),
    ("cooldown_fits", "gpt", {"schedule": {"kind": "wsd", "cooldown": 0}}, {"schedule.cooldown"}),
    (
        "cooldown_fits",
        "gpt",
        {"schedule": {"kind": "constant_cooldown", "cooldown": 201}},
        {"schedule.cooldown"},
    ),
    (
        "cooldown_fits",
        "gpt",
        {"schedule": {"kind": "wsd", "warmup": 0.6, "cooldown": 0.5}},
        {"schedule.cooldown"},
    ),
    (
        "given_parts_come_from_python",
        "gpt",
        {"sampler": {"kind": "given", "target": "mine:<lambda>"}},
        {"sampler.kind"},
    ),
    (
        "momentum_is_ordered",
        "gpt",
        {"schedule": {**ONE_CYCLE, "momentum_low": 0.96}},
        {"schedule.momentum_low"},
    ),
    (
        "cycled_momentum_needs_momentum",
        "images",
        {"schedule": ONE_CYCLE, "optimizer.momentum": 0.0},
        {"schedule.cycle_momentum"},
    ),
    (
        "plateau_needs_evaluations",
        "gpt",
        {"schedule": PLATEAU, "evaluate.every": "end"},
        {"schedule.kind"},
    ),
    (
        "plateau_needs_evaluations",
        "gpt",
        {"schedule": PLATEAU, "evaluate.every": "never"},
        {"schedule.kind"},
    ),
    (
        "nesterov_needs_momentum",
        "images",
        {"optimizer.nesterov": True, "optimizer.momentum": 0},
        {"optimizer.nesterov"},
    ),
    (
        "static_loss_scale_is_for_fp16",
        "gpt",
        {"precision": {"dtype": "bf16", "loss_scale": 1024}},
        {"precision.loss_scale"},
    ),
    (
        "static_loss_scale_is_for_fp16",
        "gpt",
        {"precision": {"loss_scale": 1024.0}},
        {"precision.loss_scale"},
    ),
    (
        "average_must_be_kept_to_be_evaluated",
        "gpt",
        {"evaluate.weights": "ema"},
        {"evaluate.weights"},
    ),
    (
        "early_stopping_needs_evaluations",
        "gpt",
        {"early_stopping": STOPPING, "evaluate.every": "end"},
        {"early_stopping.kind"},
    ),
    (
        "metrics_need_a_validation_set",
        "gpt",
        {"early_stopping": STOPPING, "schedule": PLATEAU, "data.validation_fraction": 0},
        {"early_stopping.kind", "schedule.kind"},
    ),
    (
        "tokens_must_be_counted",
        "images",
        {
            "train.horizon": "1M tokens",
            "schedule.warmup": "10k tokens",
            "evaluate.every": "10k tokens",
            "checkpoint.every": "10k tokens",
        },
        {"train.horizon", "schedule.warmup", "evaluate.every", "checkpoint.every"},
    ),
    (
        "tokens_must_be_counted",
        "images",
        {"task": {"kind": "function", "loss": "a:b"}, "train.horizon": "1M tokens"},
        {"train.horizon"},
    ),
    ("delta_is_for_huber", "gpt", {**DIABETES, "task.delta": 2.0}, {"task.delta"}),
    (
        "the_spike_must_be_left_out",
        "gpt",
        {"guard": {"spikes": "roll-back", "leave_out_windows": 100}},
        {"guard.leave_out_windows"},
    ),
    ("task_fits_the_data", "images", {"task": {"kind": "regression"}}, {"task.kind"}),
    ("task_fits_the_data", "gpt", {"task": {"kind": "classification"}}, {"task.kind"}),
    ("model_fits_the_data", "images", {"model": GPT["model"]}, {"model.kind"}),
    ("model_fits_the_data", "gpt", {"model": IMAGES["model"]}, {"model.kind"}),
    ("heads_divide_the_embedding", "gpt", {"model.num_heads": 3}, {"model.num_heads"}),
    (
        "heads_divide_the_embedding",
        "gpt",
        {"model.embedding_dim": 33, "model.num_heads": 3},
        {"model.num_heads"},
    ),
    (
        "heads_divide_the_embedding",
        "gpt",
        {"model.num_heads": 4, "model.num_kv_heads": 3},
        {"model.num_kv_heads"},
    ),
    ("sequences_fit_the_model", "gpt", {"model.sequence_length": 63}, {"model.sequence_length"}),
    (
        "sequences_fit_the_model",
        "gpt",
        {"model.vocabulary_size": 8191},
        {"model.vocabulary_size"},
    ),
    (
        "stages_have_blocks",
        "images",
        {"model.blocks_per_stage": [1, 1, 1]},
        {"model.blocks_per_stage"},
    ),
    ("files_have_a_path", "gpt", {"data.source": "files"}, {"data.path"}),
    ("files_have_a_path", "gpt", {"data.path": "somewhere"}, {"data.path"}),
    (
        "named_metric_needs_a_direction",
        "gpt",
        {"contract": {**CONTRACT, "metric": "validation/accuracy"}},
        {"contract.direction"},
    ),
    (
        "slices_need_a_baseline",
        "gpt",
        {"contract": {**CONTRACT, "slices": [SLICE]}},
        {"contract.slices"},
    ),
    (
        "slices_need_a_baseline",
        "gpt",
        {"contract": {**CANDIDATE, "slices": [{**SLICE, "metric": "loss"}]}},
        {"contract.slices.0.metric"},
    ),
    (
        "cost_needs_a_price",
        "gpt",
        {"contract": {**CONTRACT, "budget": {"cost": 5}}},
        {"contract.budget.cost"},
    ),
    (
        "kind_of_result_demands",
        "gpt",
        {"contract": {**CANDIDATE, "slices": [], "target": "none"}},
        {"contract.slices", "contract.target"},
    ),
    (
        "adapter_has_base_weights",
        "gpt",
        {"contract": {**CANDIDATE, "kind": "adapter"}},
        {"model.initial_weights"},
    ),
    (
        "contract_needs_evaluations",
        "gpt",
        {"contract": CANDIDATE, "evaluate.every": "never"},
        {"contract.target"},
    ),
    (
        "contract_needs_evaluations",
        "gpt",
        {"contract": CANDIDATE, "data.validation_fraction": 0.0},
        {"contract.target"},
    ),
    (
        "nothing_goes_to_a_disk",
        "gpt",
        {"memory": {"offload_activations": "nvme"}},
        {"memory.offload_activations"},
    ),
    (
        "one_way_to_keep_a_block",
        "gpt",
        {"memory": {"offload_activations": "cpu", "recompute": "selective"}},
        {"memory.offload_activations"},
    ),
    (
        "one_way_to_keep_a_block",
        "gpt",
        {"memory": {"offload_activations": "cpu"}, "train.compile": "blocks"},
        {"memory.offload_activations"},
    ),
    (
        "one_way_to_keep_a_block",
        "gpt",
        {"memory": {"recompute": "budget"}, "train.compile": "blocks"},
        {"memory.recompute"},
    ),
    (
        "weights_come_and_go_uncompiled",
        "gpt",
        {"memory": {"offload_parameters": "cpu"}, "train.compile": "blocks"},
        {"memory.offload_parameters"},
    ),
    (
        "the_optimizer_steps_after_the_backward",
        "gpt",
        {"memory": {"optimizer_in_backward": True}},
        {"memory.optimizer_in_backward"},
    ),
]

# base, what is changed: all of it is fine
FINE: list[tuple[str, dict[str, Any]]] = [
    ("gpt", {}),
    ("images", {}),
    ("gpt", DIABETES),
    ("gpt", FIXED),
    ("gpt", {**TIME, "schedule": {"kind": "warmup_cosine", "warmup": 5, "total": 500}}),
    ("gpt", {**TIME, "schedule": {"kind": "warmup_cosine", "warmup": 0.0, "total": 500}}),
    ("gpt", {**TIME, "schedule": {"kind": "one_cycle", "total": 500}}),
    ("gpt", {**TIME, "schedule": {"kind": "wsd", "warmup": 5}}),
    (
        "gpt",
        {**TIME, "schedule": {"kind": "wsd", "warmup": 5, "cooldown": 9, "cooldown_start": 90}},
    ),
    ("gpt", {**TIME, "schedule": {"kind": "inverse_sqrt", "warmup": 5}}),
    ("gpt", {**TIME, "schedule": {"kind": "multi_step", "milestones": [5, 6]}}),
    ("gpt", {"schedule.warmup": "200 steps"}),
    ("gpt", {"train.horizon": "1M tokens", "schedule.warmup": "201 steps"}),
    ("gpt", {"train.horizon": "1M tokens", "schedule.warmup": "10k tokens"}),
    ("gpt", {"schedule": {"kind": "multi_step", "milestones": [0.3, 0.6]}}),
    ("gpt", {"schedule": {"kind": "wsd", "cooldown": 200, "warmup": 0}}),
    ("gpt", {"schedule": {"kind": "wsd", "cooldown": 0.5, "warmup": 0.5}}),
    ("gpt", {"schedule": {**ONE_CYCLE, "momentum_low": 0.95}}),
    ("images", {"schedule": {**ONE_CYCLE, "cycle_momentum": False}, "optimizer.momentum": 0.0}),
    ("gpt", {"schedule": ONE_CYCLE}),
    ("gpt", {"schedule": PLATEAU, "evaluate.every": "10 steps"}),
    ("images", {"optimizer.nesterov": True}),
    ("images", {"optimizer.momentum": 0}),
    ("gpt", {"precision": {"dtype": "fp16", "loss_scale": 1024}}),
    ("gpt", {"precision": {"dtype": "bf16", "loss_scale": "dynamic"}}),
    ("gpt", {"evaluate.weights": "ema", "ema": {"kind": "on"}}),
    ("gpt", {"early_stopping": STOPPING, "evaluate.every": "epoch"}),
    ("gpt", {"evaluate.every": "never"}),
    ("gpt", {"data.validation_fraction": 0}),
    (
        "images",
        {
            "data": {
                "kind": "image_folder",
                "path": "a",
                "validation_path": "b",
                "validation_fraction": 0,
            },
            "early_stopping": STOPPING,
        },
    ),
    (
        "images",
        {
            "data": {
                "kind": "custom",
                "target": "a:b",
                "validation_target": "a:c",
                "validation_fraction": 0,
            },
            "early_stopping": STOPPING,
        },
    ),
    ("images", {"task": {"kind": "custom", "target": "a:b"}, "train.horizon": "1M tokens"}),
    (
        "images",
        {
            "task": {"kind": "function", "loss": "a:b", "unit": "tokens"},
            "train.horizon": "1M tokens",
        },
    ),
    ("images", {"train.horizon": "1M samples"}),
    ("gpt", {**DIABETES, "task.loss": "huber", "task.delta": 2.0}),
    ("gpt", {"model": {"kind": "custom", "target": "a:b"}}),
    ("images", {"data": {"kind": "custom", "target": "a:b"}, "task": {"kind": "multilabel"}}),
    ("gpt", {"model.embedding_dim": 33, "model.num_heads": 3, "model.positions": "learned"}),
    ("gpt", {"model.num_heads": 4, "model.num_kv_heads": 2}),
    ("gpt", {"model.sequence_length": 64, "model.vocabulary_size": 8192}),
    ("images", {"model.blocks_per_stage": [1, 2]}),
    ("images", {"model.blocks_per_stage": 3}),
    ("gpt", {"data.source": "files", "data.path": "somewhere"}),
    ("gpt", {"contract": CANDIDATE}),
    ("gpt", {"contract": {**CONTRACT, "metric": "other/loss", "direction": "min"}}),
    (
        "gpt",
        {"contract": {**CONTRACT, "budget": {"cost": 5, "price_per_device_hour": 2.5}}},
    ),
    ("gpt", {"contract": CONTRACT, "evaluate.every": "never"}),
    (
        "gpt",
        {"contract": {**CANDIDATE, "kind": "adapter"}, "model.initial_weights": "base.safetensors"},
    ),
    ("gpt", {"memory": {"offload_activations": "cpu", "loss": "chunked"}}),
    ("gpt", {"memory": {"recompute": "blocks", "loss": "chunked"}, "train.compile": "blocks"}),
]


@pytest.mark.parametrize(("name", "base", "changes", "paths"), BROKEN)
def test_a_broken_rule_names_its_keys(
    name: str, base: str, changes: dict[str, Any], paths: set[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve_recipe(changed(BASES[base], changes))
    found = caught.value.violations
    assert {violation.path for violation in found} == paths
    assert all(violation.rule and violation.origin for violation in found)
    (rule,) = [rule for rule in RULES if rule.__name__ == name]
    sections = resolve_partly(changed(BASES[base], changes))
    names = rule.__code__.co_varnames[: rule.__code__.co_argcount]
    assert {v.path for v in rule(**{n: sections[n] for n in names})} == paths


def resolve_partly(recipe: dict[str, Any]) -> dict[str, Any]:
    validated = Recipe.model_validate(recipe | {"schedule": named(recipe.get("schedule"))})
    return {name: getattr(validated, name) for name in Recipe.model_fields}


def named(schedule: dict[str, Any] | None) -> dict[str, Any]:
    return {"kind": "warmup_cosine", **(schedule or {})}


@pytest.mark.parametrize(("base", "changes"), FINE)
def test_what_only_looks_like_it_is_fine(base: str, changes: dict[str, Any]) -> None:
    resolve_recipe(changed(BASES[base], changes))


def test_the_remedy_for_heads_divides() -> None:
    for heads, remedy in ((3, "2 heads"), (12, "8 heads"), (33, "32 heads")):
        with pytest.raises(ConfigError) as caught:
            resolve_recipe(changed(GPT, {"model.num_heads": heads}))
        assert [v.remedy for v in caught.value.violations] == [f"use for example {remedy}"]


def test_every_rule_is_broken_by_a_case_here() -> None:
    assert {rule.__name__ for rule in RULES} == {name for name, *_ in BROKEN}
    assert all(rule.__doc__ for rule in RULES)


def test_rules_of_missing_sections_are_left_out() -> None:
    assert broken_rules({}) == []
    # Settings have no task and no data, so nothing is known of tokens or validation sets.
    resolve_settings({"train": {"horizon": "1M tokens", "micro_batch": 1}})


def test_a_rule_broken_by_a_default_says_so() -> None:
    with pytest.raises(ConfigError) as caught:
        resolve_recipe(changed(GPT, TIME))
    assert {v.path: v.origin for v in caught.value.violations} == {
        "schedule.total": "default",
        "schedule.warmup": "default",
    }
