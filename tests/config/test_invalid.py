"""What the schema refuses: path, origin, rule, and the key that was meant."""

from __future__ import annotations

from typing import Any

import pytest

from config.recipes_for_tests import GPT, changed
from surefoot.config import load_recipe, resolve_recipe
from surefoot.core.errors import ConfigError


def refused(changes: dict[str, Any]) -> dict[str, tuple[str, str]]:
    with pytest.raises(ConfigError) as caught:
        resolve_recipe(changed(GPT, changes))
    assert len({v.path for v in caught.value.violations}) == len(caught.value.violations)
    return {v.path: (v.rule, v.remedy) for v in caught.value.violations}


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("train.micro_bach", "train.micro_batch"),
        ("train.horizn", "train.horizon"),
        ("optimiser.lr", "optimizer"),
        ("precison.dtype", "precision"),
        ("optimizer.weight_decy", "optimizer.weight_decay"),
        ("model.num_layer", "model.num_layers"),
        ("optimizer.learning_rate", "optimizer.lr"),
        ("learning_rate", "optimizer.lr"),
        ("lr", "optimizer.lr"),
        ("batch_size", "train.micro_batch"),
        ("train.batch_size", "train.micro_batch"),
        ("gradient_accumulation_steps", "train.accumulation"),
        ("model.n_embd", "model.embedding_dim"),
        ("model.d_model", "model.embedding_dim"),
        ("max_steps", "train.horizon"),
        ("num_workers", "loader.workers"),
        ("loader.num_workers", "loader.workers"),
        ("warmup_steps", "schedule.warmup"),
        ("warmup", "schedule.warmup"),
        ("sequence_length", "model.sequence_length or data.sequence_length"),
        ("train.clip_nrom", "train.clip_norm"),
        ("max_grad_norm", "train.clip_norm"),
        ("schedule.floors", "schedule.floor"),
    ],
)
def test_an_unknown_key_names_the_key_that_was_meant(path: str, meant: str) -> None:
    found = refused({path: 1})
    rule, remedy = found.get(path) or found[path.split(".")[0]]
    assert rule.startswith("unknown key")
    assert remedy == f"did you mean {meant}?"


def test_an_unknown_key_of_a_kind_says_the_kind() -> None:
    rule, _ = refused({"optimizer": {"kind": "sgd", "lr": 0.1, "betas": [0.9, 0.95]}})[
        "optimizer.betas"
    ]
    assert rule == "unknown key for optimizer of kind 'sgd'"


def test_a_key_like_no_other_lists_the_known_ones() -> None:
    rule, remedy = refused({"guard.zzz": 1})["guard.zzz"]
    assert rule == "unknown key"
    assert remedy == (
        "known here: non_finite, skip_budget, spikes, spike_budget, roll_back_updates, "
        "leave_out_windows, deadline, restarts_without_progress, compare_ranks_every"
    )


def test_an_unknown_key_inside_a_list() -> None:
    found = refused({"optimizer": {"groups": [{"pattern": "a"}, {"pattern": "b", "lr_mult": 2}]}})
    assert found == {
        "optimizer.groups.1.lr_mult": (
            "unknown key",
            "did you mean optimizer.groups.1.lr_multiplier?",
        )
    }


@pytest.mark.parametrize(
    ("path", "value", "rule", "remedy"),
    [
        ("optimizer.kind", "adamww", "unknown kind 'adamww'; one of adamw, adam, sgd", "'adamw'"),
        ("schedule.kind", "cosine", "unknown kind 'cosine'", "'warmup_cosine'"),
        ("schedule.kind", 3, "unknown kind '3'", ""),
        ("model", {"num_layers": 2}, "missing", "one of gpt, resnet, mlp, custom"),
        ("train.micro_batch", "8", "must be a valid integer, not the text '8'", ""),
        ("train.micro_batch", 8.0, "must be a valid integer, not 8.0", ""),
        ("train.micro_batch", True, "must be a valid integer, not True", ""),
        ("train.micro_batch", 0, "must be greater than or equal to 1, not 0", ""),
        ("train.micro_batch", None, "must be a valid integer, not None", ""),
        ("train.horizon", 1000, "1000 has no unit", "'1000 steps'"),
        ("train.horizon", "1000", "'1000' has no unit", "'1000 steps'"),
        ("train.horizon", "10 setps", "unknown unit 'setps'", "'steps'"),
        ("train.horizon", "4 GiB", "not bytes", ""),
        ("train.horizon", "0 steps", "must be more than 0 steps", ""),
        ("train.horizon", [3], "must be a count in steps", ""),
        ("train.clip_norm", False, "a number above 0, or 'off', not False", ""),
        ("train.clip_norm", 0, "a number above 0, or 'off', not 0", ""),
        ("train.clip_norm", float("inf"), "a number above 0, or 'off', not inf", ""),
        ("train.compile", "block", "must be 'auto', 'off', 'blocks' or 'whole'", "'blocks'"),
        ("train.compile", False, "must be 'auto', 'off', 'blocks' or 'whole', not False", ""),
        ("optimizer.lr", "3e-4x", "must be a valid number, not '3e-4x'", ""),
        ("optimizer.lr", -1, "must be greater than 0, not -1", ""),
        ("optimizer.lr", 0.0, "must be greater than 0, not 0.0", ""),
        ("optimizer.lr", float("nan"), "must be a finite number, not nan", ""),
        ("optimizer.betas", [0.9], "", ""),
        ("optimizer.weight_decay", -0.1, "must be greater than or equal to 0", ""),
        ("schedule.floor", 1.5, "must be less than or equal to 1, not 1.5", ""),
        ("schedule.floor", -0.5, "must be greater than or equal to 0, not -0.5", ""),
        ("schedule.warmup", 1.5, "a share of the horizon is in [0, 1), not 1.5", "100"),
        ("schedule.warmup", 1.0, "a share of the horizon is in [0, 1), not 1.0", "100"),
        ("schedule.warmup", -0.1, "a share of the horizon is in [0, 1), not -0.1", "100"),
        ("schedule.warmup", -5, "-5 has no unit", ""),
        ("schedule.warmup", "10 s", "not seconds", ""),
        ("schedule.total", "horzon", "'horzon' is not a count, or 'horizon'", ""),
        ("evaluate.every", "epochs", "or 'epoch', or 'end', or 'never'", ""),
        ("evaluate.micro_batch", "train", "or 'as-in-training', not 'train'", ""),
        ("loader.deadline", "2 steps", "must be a count in seconds, not steps", ""),
        ("loader.deadline", 120, "120 has no unit", "'120 s'"),
        ("model.num_kv_heads", 0, "at least 1, or 'as-heads', not 0", ""),
        ("model.vocabulary_size", "auto", "or 'from-data', not 'auto'", ""),
        ("data.validation_fraction", 1.0, "must be less than 1, not 1.0", ""),
        ("data.vocabulary_size", 100, "must be greater than or equal to 257", ""),
        ("train", 3, "must be a section of keys, not 3", ""),
        ("guard", "skip", "must be a section of keys, not 'skip'", ""),
        ("seed", -1, "must be greater than or equal to 0", ""),
        ("deterministic", 1, "must be a valid boolean, not 1", ""),
        ("device", "gpu", "must be 'auto', 'cpu', 'cuda' or 'mps', not 'gpu'", ""),
        ("ema", {"kind": "on", "decay": 1.0}, "must be less than 1", ""),
    ],
)
def test_wrong_values(path: str, value: Any, rule: str, remedy: str) -> None:
    found = refused({path: value})
    assert len(found) == 1
    ((where, (said, advice)),) = found.items()
    assert where.startswith(path)
    assert rule in said
    assert remedy in advice


@pytest.mark.parametrize("blocks", [[], [0], 0, [1, "2"], "2", None, True])
def test_numbers_of_blocks(blocks: Any) -> None:
    changes = {"model": {"kind": "resnet", "blocks_per_stage": blocks}}
    rule, _ = refused(changes)["model.blocks_per_stage"]
    assert "a whole number of at least 1, or a list of them" in rule


def test_rules_are_checked_beside_sections_that_are_wrong() -> None:
    found = refused({"train": {"horizon": "10 min", "micro_batch": 4}, "seed": "x", "zzz": 1})
    assert set(found) == {"seed", "zzz", "schedule.total", "schedule.warmup"}


@pytest.mark.parametrize(
    ("target", "valid"),
    [
        ("mine:Net", True),
        ("mine.models:Net", True),
        ("mine.models:Net.small", True),
        ("_a.b_2:c", True),
        ("mine.models.Net", False),
        ("mine:models:Net", False),
        ("mine models:Net", False),
        ("mine:Net()", False),
        ("../mine:Net", False),
        ("mine:", False),
        (":Net", False),
        ("mine..models:Net", False),
        ("2mine:Net", False),
        ("mine:Net\n", False),
        ("mine:lambda x", False),
        (3, False),
    ],
)
def test_spelling_of_own_code(target: Any, valid: bool) -> None:
    changes = {
        "model": {"kind": "custom", "target": target},
        "data": {"kind": "custom", "target": target},
        "task": {"kind": "custom", "target": target},
    }
    if valid:
        recipe = resolve_recipe(changed(GPT, changes)).recipe
        assert recipe.model.kind == "custom"
        assert recipe.model.target == target
    else:
        found = refused(changes)
        assert set(found) == {"model.target", "data.target", "task.target"}
        assert all("'package.module:Name'" in rule for rule, _ in found.values())


def test_everything_wrong_is_said_at_once(tmp_path: Any) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(
        """\
name: bad
model: {kind: gpt, num_layers: two, num_heads: 3, embedding_dim: 32, feedforward_dim: 64}
data: {kind: text, source: files}
task: {kind: generation}
train:
  horizon: 10 min
  micro_bach: 8
optimizer: {kind: sgd, lr: 0.1, momentum: 0.0, nesterov: true}
ema: {kind: on}
precision: {dtype: bf16, loss_scale: 1024}
"""
    )
    with pytest.raises(ConfigError) as caught:
        load_recipe(path, ["evaluate.weigths=ema", "schedule.floor=2"])
    found = {v.path: v for v in caught.value.violations}
    assert {path: v.origin for path, v in found.items()} == {
        "model.num_layers": "bad.yaml:2",
        "train.micro_batch": "bad.yaml:5",
        "train.micro_bach": "bad.yaml:7",
        "evaluate.weigths": "override",
        "schedule.floor": "override",
        "optimizer.nesterov": "bad.yaml:8",
        "precision.loss_scale": "bad.yaml:10",
        "data.path": "default",
    }
    assert found["evaluate.weigths"].remedy == "did you mean evaluate.weights?"
    lines = str(caught.value).splitlines()
    assert lines[0] == "8 problems in the configuration:"
    assert len(lines) == 9
    assert (
        "  - train.micro_bach (bad.yaml:7): unknown key; did you mean train.micro_batch?" in lines
    )
