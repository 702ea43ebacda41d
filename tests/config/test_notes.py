"""Advice: given where the field does otherwise, with its place, and only there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from config.recipes_for_tests import GPT, IMAGES, changed
from surefoot.config import load_recipe, recipe_names, resolve_recipe
from surefoot.config.notes import notes
from surefoot.core.finding import Severity

SGD = {"kind": "sgd", "lr": 0.1}
ADAM = {"kind": "adam"}
DIABETES = {
    "model": {"kind": "mlp", "hidden": [8]},
    "data": {"kind": "diabetes"},
    "task": {"kind": "regression"},
}


def slugs(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, str]:
    found = notes(resolve_recipe(changed(base, changes)))
    return {f.slug: str(f.evidence["key"]) for f in found}


@pytest.mark.parametrize(
    ("base", "changes", "expected"),
    [
        (GPT, {}, {}),
        (IMAGES, {}, {}),
        (
            GPT,
            {"schedule": {"kind": "constant", "warmup": 5}},
            {"constant-rate-for-language-model": "schedule.kind"},
        ),
        (
            GPT,
            {"schedule": {"kind": "constant_cooldown"}},
            {"no-warmup-for-transformer": "schedule.warmup"},
        ),
        (IMAGES, {"schedule": {"kind": "constant"}}, {}),
        (GPT, {"optimizer": SGD}, {"sgd-for-transformer": "optimizer.kind"}),
        (
            GPT,
            {"optimizer": SGD, "schedule.warmup": 0},
            {"sgd-for-transformer": "optimizer.kind"},
        ),
        (GPT, {"optimizer": {"betas": [0.9, 0.999]}}, {}),
        (
            GPT,
            {"optimizer": {"betas": [0.9, 0.9995]}},
            {"slow-second-moment-for-language-model": "optimizer.betas"},
        ),
        (IMAGES, {"optimizer": {"kind": "adam", "betas": [0.9, 0.9995]}}, {}),
        (GPT, {"optimizer": {"weight_decay": 0.01}}, {}),
        (
            GPT,
            {"optimizer": {"weight_decay": 0.2}},
            {"unusual-weight-decay": "optimizer.weight_decay"},
        ),
        (
            GPT,
            {"optimizer": {"weight_decay": 0}},
            {"unusual-weight-decay": "optimizer.weight_decay"},
        ),
        (IMAGES, {"optimizer.weight_decay": 5e-4}, {}),
        (GPT, {"optimizer": ADAM}, {}),
        (
            GPT,
            {"optimizer": {**ADAM, "weight_decay": 0.1}},
            {"decay-through-adam": "optimizer.weight_decay"},
        ),
        (GPT, {"schedule.warmup": 0}, {"no-warmup-for-transformer": "schedule.warmup"}),
        (GPT, {"schedule.warmup": 0.0}, {"no-warmup-for-transformer": "schedule.warmup"}),
        (GPT, {"schedule": {"kind": "one_cycle"}}, {}),
        (IMAGES, {"schedule.warmup": 0}, {}),
        (GPT, {"optimizer": {"lr": 0.02}}, {"unusual-peak-rate": "optimizer.lr"}),
        (GPT, {"optimizer": {"lr": 0.01}}, {}),
        (GPT, {"optimizer": {"lr": 1e-5}}, {}),
        (GPT, {"optimizer": {"lr": 5e-6}}, {"unusual-peak-rate": "optimizer.lr"}),
        (
            GPT,
            {"model.embedding_dim": 36},
            {"dim-not-multiple-of-8": "model.embedding_dim"},
        ),
        (GPT, {"model.vocabulary_size": 50257}, {"dim-not-multiple-of-8": "model.vocabulary_size"}),
        (GPT, {"data.vocabulary_size": 1001}, {"dim-not-multiple-of-8": "data.vocabulary_size"}),
        (IMAGES, {"model.widths": [8, 12]}, {"dim-not-multiple-of-8": "model.widths"}),
        (IMAGES, {**DIABETES, "model.hidden": [20]}, {"dim-not-multiple-of-8": "model.hidden"}),
    ],
)
def test_advice(base: dict[str, Any], changes: dict[str, Any], expected: dict[str, str]) -> None:
    assert slugs(base, changes) == expected


def test_advice_has_a_place_and_a_fix(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(resolve_recipe(changed(GPT, {"optimizer": SGD})).as_yaml())
    (finding,) = notes(load_recipe(path))
    line = path.read_text().splitlines()[finding.line - 1]
    assert line.strip().startswith("kind: sgd")
    assert finding.file == "a.yaml"
    assert finding.fix == "use optimizer.kind=adamw"
    assert finding.severity is Severity.HINT
    assert finding.as_json()["evidence"] == {
        "key": "optimizer.kind",
        "source": "arXiv:1912.03194",
    }


def test_advice_says_what_to_write() -> None:
    recipe = changed(GPT, {"model.embedding_dim": 36, "optimizer": {"betas": [0.9, 0.9995]}})
    second_moment, dim = notes(resolve_recipe(recipe))
    assert "over 2,000 updates" in second_moment.message
    assert dim.fix == "use 40"
    assert dim.evidence == {"key": "model.embedding_dim", "dim": 36}


def test_advice_on_an_override_has_no_line() -> None:
    (finding,) = notes(resolve_recipe(GPT, ["optimizer.lr=0.02"]))
    assert (finding.file, finding.line) == ("", 0)


def test_what_an_override_dropped_is_said() -> None:
    recipe = changed(GPT, {"optimizer": {"kind": "adamw", "lr": 1e-3, "betas": [0.9, 0.95]}})
    (finding,) = notes(resolve_recipe(recipe, ["optimizer.kind=adam"]))
    assert finding.code == "CFG001"
    assert "optimizer.lr, optimizer.betas" in finding.message


def test_codes_and_slugs_are_one_to_one() -> None:
    found = []
    for changes in (
        {"optimizer": {**SGD}},
        {"optimizer": {**ADAM, "weight_decay": 1.0, "lr": 1.0, "betas": [0.9, 0.9999]}},
        {"optimizer": {"weight_decay": 1.0}, "schedule": {"kind": "constant"}},
        {"model.embedding_dim": 36},
    ):
        found += notes(resolve_recipe(changed(GPT, changes)))
    pairs = {(f.code, f.slug) for f in found}
    assert len({code for code, _ in pairs}) == len({slug for _, slug in pairs}) == len(pairs) == 8


@pytest.mark.parametrize("name", recipe_names())
def test_our_own_recipes_need_no_advice(name: str) -> None:
    assert notes(load_recipe(name)) == []
