"""`surefoot show`: each word's table, and that its JSON says the same."""

from __future__ import annotations

import json
from typing import Any

import pytest

from surefoot.cli import main as command
from surefoot.cli.show_parts import SHELVES
from surefoot.core.doors import OURS
from surefoot.core.errors import EXIT_DONE, EXIT_REQUEST

Capture = pytest.CaptureFixture[str]


def shown(capsys: Capture, *words: str) -> tuple[str, dict[str, Any]]:
    """What people see, and the JSON."""
    assert command.invoke(["show", *words]) == EXIT_DONE
    text = capsys.readouterr().out
    assert "next:" in text
    assert command.invoke(["show", *words, "--json", "-"]) == EXIT_DONE
    captured = capsys.readouterr()
    assert captured.err == text
    facts: dict[str, Any] = json.loads(captured.out)
    return text, facts


def test_recipes_are_listed_with_what_they_are(capsys: Capture) -> None:
    text, facts = shown(capsys, "recipes")
    names = [row["recipe"] for row in facts["recipes"]]
    assert "stdlib-gpt" in names
    for row in facts["recipes"]:
        assert row["recipe"] in text
        assert row["what"] in text
        assert not row["what"].startswith(("#", "name:"))


def test_config_shows_each_value_with_its_origin(recipe: str, capsys: Capture) -> None:
    text, facts = shown(capsys, "config", recipe, "--set", "optimizer.lr=0.5")
    assert "lr: 0.5  # override" in text
    assert "micro_batch: 2  # tiny.yaml:" in text
    assert "seed: 0  # default" in text
    assert facts["config"]["optimizer"]["lr"] == 0.5
    assert facts["config"]["train"]["clip_norm"] == 1.0
    assert facts["config"]["optimizer"]["betas"] == [0.9, 0.95]
    assert facts["origins"]["optimizer.lr"] == "override"


def test_params_puts_each_tensor_in_one_group(recipe: str, capsys: Capture) -> None:
    text, facts = shown(capsys, "params", recipe)
    rows = {row["name"]: row for row in facts["rows"]}
    assert rows["norm.weight"]["group"] == "no_decay"
    assert rows["blocks.0.attention.query.weight"]["weight_decay"] == 0.1
    assert facts["elements"] == sum(row["num_elements"] for row in facts["rows"])
    for name in rows:
        assert name in text


def test_params_shows_overrides_and_disagreements(recipe: str, capsys: Capture) -> None:
    override = "optimizer.groups=[{pattern: norm.weight, lr_multiplier: 0.5, weight_decay: 0.2}]"
    text, facts = shown(
        capsys, "params", recipe, "--set", override, "--set", "model.norm=layernorm"
    )
    row = next(row for row in facts["rows"] if row["name"] == "norm.weight")
    assert (row["lr_multiplier"], row["weight_decay"]) == (0.5, 0.2)
    assert row["decided_by"] == "override"
    assert ("(*)" in text) == bool(facts["disagreements"])


def test_optimizers_measure_what_they_keep(capsys: Capture) -> None:
    text, facts = shown(capsys, "optimizers")
    kept = {row["optimizer"]: row["values_kept_an_element"] for row in facts["optimizers"]}
    assert kept == {"adamw": 2.0, "adam": 2.0, "sgd": 1.0}
    assert "lr required" in text


@pytest.mark.parametrize("word", SHELVES)
def test_each_kind_of_part_is_listed_with_its_origin(word: str, capsys: Capture) -> None:
    text, facts = shown(capsys, word)
    rows = {row["name"]: row for row in facts[word]}
    assert list(rows) == sorted(OURS.get(SHELVES[word].door, {}))
    for name, row in rows.items():
        assert name in text and row["what"] and row["from"] == "surefoot"


def test_schedule_says_first_peak_and_last(recipe: str, capsys: Capture) -> None:
    text, facts = shown(capsys, "schedule", recipe)
    assert facts["updates"] == 20
    assert facts["first"] == pytest.approx(0.01 / 5)
    assert facts["peak"] == {"rate": 0.01, "update": 4}
    assert facts["last"] == facts["rates"][19]
    assert "first  0.002   update 0" in text
    assert "peak   0.01   update 4" in text
    assert any("\u2800" <= character <= "\u28ff" for character in text)


def test_schedule_over_epochs_opens_the_data(recipe: str, capsys: Capture) -> None:
    _, one = shown(capsys, "schedule", recipe, "--set", "train.horizon=1 epoch")
    _, three = shown(capsys, "schedule", recipe, "--set", "train.horizon=3 epochs")
    assert three["updates"] == 3 * one["updates"] > 0


def test_a_long_schedule_is_sampled_with_its_ends(
    recipe: str, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("surefoot.cli.show.MAX_DRAWN_UPDATES", 7)
    _, facts = shown(capsys, "schedule", recipe)
    assert facts["at"] == [0, 3, 6, 9, 12, 15, 18, 19]


def test_a_horizon_in_time_has_no_curve(recipe: str, capsys: Capture) -> None:
    words = ["show", "schedule", recipe, "--set", "train.horizon=1 h"]
    assert command.invoke([*words, "--set", "schedule.kind=constant"]) == EXIT_REQUEST
    assert "known only afterwards" in capsys.readouterr().err


def test_modes_lists_what_evaluation_changes(recipe: str, capsys: Capture) -> None:
    text, facts = shown(capsys, "modes", recipe, "--set", "model.dropout=0.1")
    assert any(row["kind"] == "Dropout" for row in facts["modules"])
    assert "drops with probability 0.1" in text


def test_formats_are_those_of_torch(capsys: Capture) -> None:
    text, facts = shown(capsys, "formats")
    by_name = {row["name"]: row for row in facts["formats"]}
    assert by_name["bf16"]["epsilon"] == 2.0**-7
    assert "bf16" in text


def test_hardware_names_the_devices_and_the_precision_of_auto(capsys: Capture) -> None:
    text, facts = shown(capsys, "hardware")
    assert facts["devices"][-1]["device_type"] == "cpu"
    assert facts["devices"][-1]["auto_precision"] == "fp32"
    assert "precision: auto on cpu: fp32" in text


@pytest.mark.parametrize("word", ["config", "params", "schedule", "modes"])
def test_a_recipe_that_is_not_there_is_refused(word: str, capsys: Capture) -> None:
    assert command.invoke(["show", word, "nowhere"]) == EXIT_REQUEST
    err = capsys.readouterr().err
    assert "nowhere" in err
    assert "Traceback" not in err


def test_a_typo_in_a_recipe_answers_with_the_right_key(recipe: str, capsys: Capture) -> None:
    assert command.invoke(["show", "config", recipe, "--set", "optimizer.lrr=1"]) == EXIT_REQUEST
    assert "did you mean optimizer.lr?" in capsys.readouterr().err
