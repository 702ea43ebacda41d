"""Loading: origins, overrides, references, and configs that read back as themselves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from config.recipes_for_tests import GPT, IMAGES, changed
from surefoot.config import (
    Recipe,
    Settings,
    differences,
    load_recipe,
    recipe_names,
    resolve_recipe,
    resolve_settings,
)
from surefoot.config.sections import AdamWSection, SGDSection, TrainSection
from surefoot.core.errors import ConfigError, RequestError, SurefootError
from surefoot.core.units import Seconds, Steps, Tokens

TEXT = """\
name: tiny
model:
  kind: gpt
  num_layers: 2
  num_heads: 2
  embedding_dim: 32
  feedforward_dim: 64
data:
  kind: text
  sequence_length: 64
task: {kind: generation}
train:
  horizon: 200 steps
  micro_batch: 4
  clip_norm: off
optimizer: {kind: adamw, lr: 1e-3}
"""


@pytest.fixture
def recipe_file(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.yaml"
    path.write_text(TEXT)
    return path


def violations(error: ConfigError) -> dict[str, tuple[str, str, str]]:
    return {v.path: (v.origin, v.rule, v.remedy) for v in error.violations}


def test_values_and_their_origins(recipe_file: Path) -> None:
    resolved = load_recipe(recipe_file, ["train.micro_batch=8", "seed=3"])
    recipe = resolved.recipe
    assert isinstance(recipe, Recipe)
    assert recipe.train.micro_batch == 8
    assert recipe.train.clip_norm == "off"
    assert recipe.train.horizon == Steps(200)
    assert recipe.optimizer.lr == 1e-3
    assert recipe.seed == 3
    expected = {
        "name": "tiny.yaml:1",
        "model.kind": "tiny.yaml:3",
        "model.dropout": "default",
        "data.sequence_length": "tiny.yaml:10",
        "train.micro_batch": "override",
        "train.clip_norm": "tiny.yaml:15",
        "train.accumulation": "default",
        "optimizer.lr": "tiny.yaml:16",
        "optimizer.betas": "default",
        "schedule.kind": "default",
        "seed": "override",
    }
    assert {path: resolved.origins[path] for path in expected} == expected


def test_every_value_has_an_origin(recipe_file: Path) -> None:
    resolved = load_recipe(recipe_file)
    leaves = {d.path for d in differences(resolved.as_dict(), {})}
    assert leaves == set(resolved.origins)


def test_the_yaml_names_each_origin_and_loads_as_the_same(recipe_file: Path) -> None:
    resolved = load_recipe(recipe_file, ["train.micro_batch=8"])
    text = resolved.as_yaml()
    assert "  micro_batch: 8  # override\n" in text
    assert "  clip_norm: off  # tiny.yaml:15\n" in text
    assert text.index("name:") < text.index("model:") < text.index("optimizer:")
    recipe_file.write_text(text)
    again = load_recipe(recipe_file)
    assert again.recipe == resolved.recipe
    assert again.as_dict() == resolved.as_dict()


KINDS: dict[str, dict[str, Any]] = {
    "constant": {"kind": "constant"},
    "cosine, tokens": {"kind": "warmup_cosine", "warmup": "20k tokens", "total": "150 steps"},
    "linear, bare": {"kind": "warmup_linear", "warmup": 10},
    "inverse": {"kind": "inverse_sqrt", "warmup": "1 epoch"},
    "step": {"kind": "step_decay", "period": "2 epochs"},
    "multi": {"kind": "multi_step", "milestones": [0.5, 0.75]},
    "one-cycle": {"kind": "one_cycle", "rise": "50 steps"},
    "wsd": {"kind": "wsd", "cooldown": 0.2},
    "wsd later": {"kind": "wsd"},
    "constant, cooldown": {
        "kind": "constant_cooldown",
        "cooldown": "50 steps",
        "cooldown_start": 100,
    },
    "plateau": {"kind": "plateau"},
}


@pytest.mark.parametrize("schedule", KINDS.values(), ids=KINDS)
def test_every_schedule_survives_the_run_folder(schedule: Any, tmp_path: Path) -> None:
    resolved = resolve_recipe(changed(GPT, {"schedule": schedule}))
    path = tmp_path / "config.yaml"
    path.write_text(resolved.as_yaml())
    assert load_recipe(path).recipe == resolved.recipe


CUSTOM: dict[str, Any] = {
    "name": "own",
    "model": {
        "kind": "custom",
        "target": "mine.models:Net.build",
        "arguments": {"sizes": [1, 2], "deep": {"a": None, "b": "x # y", "c": 1e-9}},
        "frozen": ["encoder.*"],
    },
    "data": {"kind": "custom", "target": "mine.data:Rows", "validation_target": "mine.data:Held"},
    "task": {
        "kind": "function",
        "loss": "mine.losses:focal",
        "weight": "mine.losses:count",
        "metrics": {"top.5": "mine.metrics:top5"},
    },
    "train": {"horizon": "2 h", "micro_batch": 1},
    "schedule": {"kind": "constant"},
    "optimizer": {
        "kind": "adam",
        "groups": [{"pattern": "head.*", "lr_multiplier": 10, "weight_decay": 0}],
    },
}


def test_own_code_is_data_and_survives(tmp_path: Path) -> None:
    resolved = resolve_recipe(CUSTOM)
    path = tmp_path / "config.yaml"
    path.write_text(resolved.as_yaml())
    again = load_recipe(path).recipe
    assert again == resolved.recipe
    assert again.model.kind == "custom"
    assert again.model.arguments == CUSTOM["model"]["arguments"]
    assert again.optimizer.groups[0].lr_multiplier == 10.0
    assert again.train.horizon == Seconds(7200)


def test_plain_data_all_the_way_down() -> None:
    plain = resolve_recipe(CUSTOM).as_dict()
    assert json.loads(json.dumps(plain, allow_nan=False)) == plain
    assert resolve_recipe(plain).as_dict() == plain


# Overrides


@pytest.mark.parametrize(
    ("override", "path", "value"),
    [
        ("optimizer.betas=[0.8, 0.9]", "optimizer.betas", [0.8, 0.9]),
        ("optimizer.lr=3e-4", "optimizer.lr", 3e-4),
        ("train.horizon=10M tokens", "train.horizon", "10000000 tokens"),
        ("train.compile=off", "train.compile", "off"),
        ("log.tensorboard=true", "log.tensorboard", True),
        ("data.path='8'", "data.path", "8"),
        ("ema={kind: on, decay: 0.9}", "ema.decay", 0.9),
        ("ema.kind=on", "ema.decay", 0.999),
        ("name=other-name", "name", "other-name"),
    ],
)
def test_overrides_are_yaml(override: str, path: str, value: Any, recipe_file: Path) -> None:
    overrides = [override] + (["data.source=files"] if path == "data.path" else [])
    plain: Any = load_recipe(recipe_file, overrides).as_dict()
    for key in path.split("."):
        plain = plain[key]
    assert plain == value
    assert type(plain) is type(value)


def test_an_override_reaches_into_a_list(recipe_file: Path) -> None:
    overrides = ["optimizer.groups=[{pattern: a}, {pattern: b}]", "optimizer.groups.1.pattern=c"]
    groups = load_recipe(recipe_file, overrides).recipe.optimizer.groups
    assert [group.pattern for group in groups] == ["a", "c"]


def test_a_later_override_wins(recipe_file: Path) -> None:
    overrides = ["train.micro_batch=8", "train.micro_batch=16"]
    assert load_recipe(recipe_file, overrides).recipe.train.micro_batch == 16


@pytest.mark.parametrize("order", [1, -1])
def test_another_kind_starts_the_section_afresh(order: int, recipe_file: Path) -> None:
    overrides = ["optimizer.kind=sgd", "optimizer.lr=0.1"][::order]
    resolved = load_recipe(recipe_file, overrides)
    assert resolved.recipe.optimizer == SGDSection(kind="sgd", lr=0.1)
    assert resolved.dropped == {
        "optimizer.kind": "tiny.yaml:16",
        "optimizer.lr": "tiny.yaml:16",
    }
    assert resolved.origins["optimizer.kind"] == resolved.origins["optimizer.lr"] == "override"
    assert resolved.origins["optimizer.momentum"] == "default"


def test_the_rate_of_another_optimizer_is_not_taken_over(recipe_file: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_recipe(recipe_file, ["optimizer.kind=sgd"])
    assert violations(caught.value) == {
        "optimizer.lr": ("override", "missing: this key has no default", "add optimizer.lr")
    }


def test_the_same_kind_drops_nothing(recipe_file: Path) -> None:
    resolved = load_recipe(recipe_file, ["optimizer.kind=adamw"])
    assert resolved.recipe.optimizer.lr == 1e-3
    assert not resolved.dropped


def test_an_optional_section_needs_no_kind(recipe_file: Path) -> None:
    recipe = load_recipe(recipe_file, ["schedule.warmup=5"]).recipe
    assert recipe.schedule.kind == "warmup_cosine"
    assert recipe.schedule.warmup == Steps(5)


@pytest.mark.parametrize(
    ("override", "path", "rule"),
    [
        ("--lr", "", "'--lr' is no assignment"),
        ("=3", "", "'=3' is no assignment"),
        ("a..b=3", "", "'a..b=3' is no assignment"),
        ("train.horizon.x=3", "train.horizon.x", "train.horizon is no section of keys"),
        ("optimizer.groups.3.pattern=x", "optimizer.groups.3.pattern", "has no '3'"),
        ("optimizer.groups.1.pattern=x", "optimizer.groups.1.pattern", "has no '1'"),
        ("optimizer.groups.x=1", "optimizer.groups.x", "is a list of 1"),
        ("seed=[1", "seed", "not YAML"),
        ("seed=!!int 3", "seed", "tag"),
        ("seed=", "seed", "must be a valid integer, not None"),
    ],
)
def test_impossible_overrides(override: str, path: str, rule: str, recipe_file: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_recipe(recipe_file, ["optimizer.groups=[{pattern: a}]", override])
    found = violations(caught.value)
    assert found[path][0] == "override"
    assert rule in found[path][1]


def test_a_section_may_be_replaced_as_a_whole(recipe_file: Path) -> None:
    resolved = load_recipe(recipe_file, ["optimizer={kind: adamw, eps: 1e-6}"])
    assert resolved.recipe.optimizer == AdamWSection(eps=1e-6)
    assert resolved.origins["optimizer.eps"] == "override"
    assert resolved.origins["optimizer.lr"] == "default"


# References


def test_a_value_may_refer_to_another(recipe_file: Path) -> None:
    overrides = [
        "model.sequence_length=${data.sequence_length}",
        "name=gpt-${model.num_layers}x${model.num_heads}",
        "optimizer.groups=[{pattern: a, weight_decay: '${optimizer.lr}'}]",
        "train.micro_batch=${train.accumulation}",
        "train.accumulation=${model.num_layers}",
    ]
    recipe = load_recipe(recipe_file, overrides).recipe
    assert recipe.model.kind == "gpt"
    assert recipe.model.sequence_length == 64
    assert recipe.name == "gpt-2x2"
    assert recipe.optimizer.groups[0].weight_decay == 1e-3
    assert recipe.train.micro_batch == 2


def test_a_reference_to_a_section_follows_those_inside() -> None:
    changes = {
        "task": {"kind": "custom", "target": "a:b", "arguments": {"x": "${seed}", "y": [1]}},
        "model": {"kind": "custom", "target": "a:c", "arguments": "${task.arguments}"},
        "seed": 7,
    }
    recipe = resolve_recipe(changed(GPT, changes)).recipe
    assert recipe.model.kind == "custom"
    assert recipe.model.arguments == {"x": 7, "y": [1]}


SECRET = "a-secret-of-the-environment"


@pytest.mark.parametrize(
    "value",
    [
        "${oc.env:SECRET}",
        "${oc.env:SECRET,x}",
        "x${oc.env:SECRET}y",
        "${oc.decode:${oc.env:SECRET}}",
        "${oc.create:{a: 1}}",
        "${oc.select:oc.env:SECRET}",
        "${${a}}",
        "${data.sequence_length}${oc.env:SECRET}",
        "$${oc.env:SECRET}",
        "\\${oc.env:SECRET}",
        "\\\\${oc.env:SECRET}",
        "${.kind}",
        "${..name}",
        "${data[kind]}",
        "${unclosed",
        "${}",
        "${a b}",
        "${env:SECRET}",
    ],
)
def test_no_resolver_and_no_environment(
    value: str, recipe_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET", SECRET)
    recipe = changed(GPT, {"data.pattern": value, "model.sequence_length": "${data.pattern}"})
    with pytest.raises(ConfigError) as caught:
        resolve_recipe(recipe)
    assert SECRET not in str(caught.value)
    assert "only ${section.key} is allowed" in violations(caught.value)["data.pattern"][1]


@pytest.mark.parametrize("target", ["model.nothing", "data.pattern", "optimizer.lr", "x"])
def test_a_reference_to_nothing_is_refused(target: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve_recipe(changed(GPT, {"data.pattern": f"${{{target}}}"}))
    assert [(v.path, v.origin) for v in caught.value.violations] == [("data.pattern", "argument")]
    assert "refers to a key that is not given" in str(caught.value)


def test_question_marks_are_a_text() -> None:
    recipe = changed(GPT, {"data.pattern": "???", "name": "as-${model.kind}"})
    assert resolve_recipe(recipe).recipe.data.pattern == "???"  # type: ignore[union-attr]


# Files


def test_a_name_is_no_path_outside() -> None:
    for name in ("../../etc/passwd", "a/b", "..", ".hidden", "a b", "", "x" * 101, "a\n", "C:x"):
        with pytest.raises(ConfigError) as caught:
            resolve_recipe(changed(GPT, {"name": name}))
        assert list(violations(caught.value)) == ["name"]


def test_no_such_recipe(tmp_path: Path) -> None:
    with pytest.raises(RequestError) as caught:
        load_recipe(tmp_path / "nothing.yaml")
    assert "nothing.yaml" in caught.value.what
    assert all(name in caught.value.remedy for name in recipe_names())
    with pytest.raises(RequestError, match="cannot read"):
        load_recipe(tmp_path)
    with pytest.raises(RequestError, match="did you mean stdlib-gpt"):
        load_recipe("stdlib-gtp")


def test_a_recipe_that_is_not_text(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_bytes(b"name: \xff\xfe")
    with pytest.raises(RequestError, match="not UTF-8"):
        load_recipe(path)


@pytest.mark.parametrize("name", recipe_names())
def test_recipes_that_come_along_are_valid(name: str) -> None:
    resolved = load_recipe(name)
    assert resolved.recipe.name == name
    assert resolved.origins["model.kind"].startswith(f"{name}.yaml:")


def test_there_is_a_default_recipe() -> None:
    assert "stdlib-gpt" in recipe_names()


# Python users


def test_settings_from_a_mapping() -> None:
    resolved = resolve_settings({"train": {"horizon": "2 epochs", "micro_batch": 4}})
    assert isinstance(resolved.config, Settings)
    assert resolved.config.optimizer == AdamWSection()
    assert resolved.origins["train.micro_batch"] == "argument"
    assert resolved.origins["optimizer.lr"] == "default"


def test_settings_from_sections_and_counts() -> None:
    train = TrainSection(horizon=Tokens(10**6), micro_batch=4)
    settings = Settings(train=train, optimizer=SGDSection(kind="sgd", lr=0.1))
    mixed = {"train": train, "optimizer": {"kind": "sgd", "lr": 0.1}}
    for given_settings in (settings, mixed):
        resolved = resolve_settings(given_settings)
        assert resolved.config == settings
        assert resolved.origins["train.horizon"] == resolved.origins["optimizer.lr"] == "argument"
        assert resolved.origins["optimizer.momentum"] == "default"


def test_settings_take_overrides() -> None:
    resolved = resolve_settings({"train": {"horizon": "9 steps"}}, ["train.micro_batch=2"])
    assert resolved.config.train.micro_batch == 2


def test_settings_given_in_python_are_checked_across_sections_too() -> None:
    settings = Settings(
        train=TrainSection(horizon=Steps(10), micro_batch=4),
        optimizer=SGDSection(kind="sgd", lr=0.1, momentum=0.0, nesterov=True),
    )
    with pytest.raises(ConfigError, match=r"optimizer.nesterov \(argument\)"):
        resolve_settings(settings)


@pytest.mark.parametrize("wrong", [None, 3, "a.yaml", ["train"]])
def test_settings_are_a_mapping(wrong: Any) -> None:
    with pytest.raises(RequestError, match="settings are a mapping"):
        resolve_settings(wrong)


def test_given_settings_are_left_alone() -> None:
    recipe = changed(GPT, {"model.sequence_length": "${data.sequence_length}"})
    recipe["optimizer"] = {"groups": [{"pattern": "a"}]}
    before = json.dumps(recipe)
    overrides = ["train.micro_batch=2", "optimizer.groups.0.pattern=b"]
    resolve_recipe(recipe, [*overrides, "model.kind=mlp", "model.kind=gpt"])
    assert json.dumps(recipe) == before


def test_a_recipe_holds_its_settings() -> None:
    recipe = resolve_recipe(IMAGES).recipe
    assert recipe.settings.train is recipe.train
    assert recipe.settings.optimizer is recipe.optimizer
    assert set(type(recipe).model_fields) - set(Settings.model_fields) == {
        *("name", "model", "data", "task", "metrics")
    }


def test_differences_by_path() -> None:
    before = resolve_recipe(GPT).as_dict()
    after = resolve_recipe(
        changed(GPT, {"optimizer.betas": [0.9, 0.99], "optimizer.kind": "adam", "seed": 1})
    ).as_dict()
    found = {d.path: (d.before, d.after) for d in differences(before, after)}
    assert found == {
        "seed": (0, 1),
        "optimizer.kind": ("adamw", "adam"),
        "optimizer.betas": ([0.9, 0.95], [0.9, 0.99]),
        "optimizer.lr": (3e-4, 1e-3),
        "optimizer.weight_decay": (0.1, 0.0),
    }
    assert differences(before, before) == []
    (added,) = differences({}, {"a": 1})
    assert str(added) == "a: '(absent)' -> 1"


# Anything at all


words = st.sampled_from(
    ["kind", "train", "gpt", "lr", "off", "5 steps", "${data.kind}", "${", "é", "", "groups"]
)
junk = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-3, 9), st.floats(), words),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(words, inner, max_size=3)),
    max_leaves=8,
)
paths = st.sampled_from(
    [
        "model",
        "model.kind",
        "model.frozen",
        "train",
        "train.horizon",
        "optimizer",
        "optimizer.groups",
        "optimizer.betas",
        "schedule",
        "schedule.warmup",
        "schedule.milestones",
        "task",
        "task.metrics",
        "data",
        "ema",
        "nothing",
        "evaluate.every",
        "loader.deadline",
        "log",
    ]
)


@given(st.dictionaries(paths, junk, max_size=3))
def test_any_junk_is_answered_with_violations(changes: dict[str, Any]) -> None:
    try:
        recipe = GPT
        for path in sorted(changes):
            recipe = changed(recipe, {path: changes[path]})
    except (AttributeError, TypeError):
        return
    try:
        resolve_recipe(recipe)
    except ConfigError as error:
        assert all(v.rule and v.origin for v in error.violations)


@given(st.lists(st.text(max_size=30), max_size=3))
def test_any_override_is_answered(overrides: list[str]) -> None:
    try:
        resolve_recipe(GPT, overrides)
    except SurefootError as error:
        assert str(error)
