"""Runs with a part of each kind from an installed package: from Python, from a recipe, resumed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import WeightedRandomSampler

import surefoot
from surefoot.build import run_recipe
from surefoot.config.load import Resolved, resolve_recipe
from surefoot.config.sections import Recipe
from surefoot.core.errors import CheckpointError, ConfigError, RequestError
from surefoot.observe.metrics_log import read_rows

pytestmark = pytest.mark.usefixtures("installed")
PLACES = {
    "optimizer": "outside_parts.training:SignDescent",
    "schedule": "outside_parts.training:halving",
    "clip": "outside_parts.training:ClipEachElement",
    "sampler": "outside_parts.training:every_other",
    "data": "outside_parts.data:larger_of_two",
    "task": "outside_parts.data:MarginTask",
    "metric": "outside_parts.data:mean_output",
    "observer": "outside_parts.watching:Counter",
    "sink": "outside_parts.watching:LossFile",
}
NAMES = {
    "optimizer": "sign_descent",
    "schedule": "halving",
    "clip": "each_element",
    "sampler": "every_other",
    "data": "larger_of_two",
    "task": "margin",
    "metric": "mean_output",
    "observer": "counter",
    "sink": "losses",
}
PERIOD = 3


def recipe(by: str, horizon: int = 12, **loader: int) -> Resolved[Recipe]:
    """A recipe whose every part comes from outside, by its name or by its target."""

    def part(kind: str, **arguments: Any) -> dict[str, Any]:
        if by == "target":
            return {"kind": "custom", "target": PLACES[kind], "arguments": arguments}
        return {"kind": NAMES[kind], "arguments": arguments}

    return resolve_recipe(
        {
            "name": "outside",
            "model": {
                "kind": "custom",
                "target": "torch.nn:Linear",
                "arguments": {"in_features": 2, "out_features": 2},
            },
            "data": {**part("data", num_samples=42), "validation_fraction": 0.25},
            "task": part("task", margin=0.5),
            "metrics": {"size": part("metric", power=2.0)},
            "optimizer": {**part("optimizer", beta=0.8), "lr": 0.05, "weight_decay": 0.1},
            "schedule": part("schedule", every=PERIOD),
            "sampler": part("sampler"),
            "train": {
                "horizon": f"{horizon} steps",
                "micro_batch": 5,
                "accumulation": 2,
                "clip_norm": 0.125,
                "clip": part("clip"),
            },
            "observers": [part("observer", start=100)],
            "log": {"console": "off", "sinks": [part("sink", digits=3)]},
            "loader": {"workers": loader.get("workers", 0)},
        }
    )


def weights(result: surefoot.RunResult) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in result.model.state_dict().items()}


def equal(one: surefoot.RunResult, other: surefoot.RunResult) -> bool:
    theirs = weights(other)
    return all(torch.equal(value, theirs[name]) for name, value in weights(one).items())


def record_of(result: surefoot.RunResult) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((result.folder / "record.json").read_text())["extra"]
    return found


def updates(result: surefoot.RunResult) -> list[dict[str, Any]]:
    rows: Any = read_rows(result.folder / "metrics.jsonl")
    return [row for row in rows if "grad_norm" in row]


def losses(result: surefoot.RunResult) -> list[tuple[int, float, float]]:
    return [(row["window"], row["loss"], row["grad_norm"]) for row in updates(result)]


@pytest.mark.parametrize("by", ["name", "target"])
def test_a_recipe_names_each_part_and_resumes_exactly(by: str, tmp_path: Path) -> None:
    whole = run_recipe(recipe(by), run_root=tmp_path)
    first = run_recipe(recipe(by, 5), run_root=tmp_path)
    second = run_recipe(recipe(by), run_root=tmp_path, resume=first.folder)
    assert second.step == whole.step == 12
    assert equal(whole, second)
    assert losses(second) == losses(whole)
    # Each part was at work: the order of the samples, the schedule's rate, the metric, the sink.
    assert updates(whole)[0]["sample_ids"] == list(range(0, 20, 2))
    rates = [row["lr"]["decay"] for row in updates(whole)]
    assert rates == [0.05 * 0.5 ** (n // PERIOD) for n in range(12)]
    assert whole.metrics["validation/size"] > 0
    assert len((second.folder / "losses.txt").read_text().splitlines()) == 12


def test_workers_change_nothing(tmp_path: Path) -> None:
    alone = run_recipe(recipe("name"), run_root=tmp_path)
    helped = run_recipe(recipe("name", workers=2), run_root=tmp_path)
    assert equal(alone, helped)


def test_python_hands_in_the_same_parts(tmp_path: Path) -> None:
    from outside_parts.data import MarginTask, larger_of_two, mean_output
    from outside_parts.training import ClipEachElement, SignDescent, every_other, halving
    from outside_parts.watching import Counter

    from surefoot.data.sources.datasets import as_source, split_source

    named = run_recipe(recipe("name"), run_root=tmp_path)
    train, validation = split_source(as_source(larger_of_two(42)), 0.25)
    counter = Counter()

    def fit(horizon: int, resume: Path | None = None) -> surefoot.RunResult:
        torch.manual_seed(0)
        trainer = surefoot.Trainer(
            nn.Linear(2, 2),
            train,
            MarginTask(margin=0.5),
            validation=validation,
            metrics={"size": mean_output},
            observers=[counter],
            optimizer=lambda groups: SignDescent(groups, beta=0.8),
            schedule=lambda n: halving(n, every=PERIOD),
            clip=ClipEachElement(0.125),
            sampler=every_other,
            settings={
                "train": {"horizon": f"{horizon} steps", "micro_batch": 5, "accumulation": 2},
                "optimizer": {"lr": 0.05, "weight_decay": 0.1},
                "log": {"console": "off"},
            },
            runs=tmp_path,
        )
        return trainer.fit(resume=resume)

    given = fit(12)
    assert equal(given, named)
    assert losses(given) == losses(named)
    assert counter.updates == 12 and counter.kinds[0] == "start"
    assert equal(fit(12, resume=fit(5).folder), given)
    record = record_of(given)
    assert set(record["own_parts"]) == {"optimizer", "schedule", "clip", "sampler"}
    assert "compares its name alone" in record["own_parts"]["schedule"]
    assert "--only resume" in record["own_parts"]["optimizer"]


def test_what_is_not_promised_stands_in_record_and_events(tmp_path: Path) -> None:
    result = run_recipe(recipe("name", 2), run_root=tmp_path)
    record = record_of(result)
    assert record["own_parts"]["sampler"].startswith("outside_parts.training:every_other (outside")
    events = (result.folder / "events.jsonl").read_text()
    assert "own optimizer: outside_parts.training:SignDescent (outside-parts 1.2.0)" in events
    ours = surefoot.Trainer(
        nn.Linear(2, 2),
        (torch.zeros(8, 2), torch.zeros(8, dtype=torch.long)),
        surefoot.ClassificationTask(2),
        settings={"train": {"horizon": "1 steps", "micro_batch": 4}, "log": {"console": "off"}},
        runs=tmp_path,
    ).fit()
    assert "own_parts" not in record_of(ours)


def test_a_skipping_run_pays_one_stated_sync(tmp_path: Path) -> None:
    given = recipe("name", 2).as_dict()
    given["guard"]["non_finite"] = "skip"
    result = run_recipe(resolve_recipe(given), run_root=tmp_path)
    record = record_of(result)
    assert record["skips"] == "on_host"
    assert "one sync" in record["own_parts"]["optimizer"]


def fit_with(tmp_path: Path, resume: Path | None = None, **parts: Any) -> surefoot.RunResult:
    torch.manual_seed(0)
    settings = {
        "train": {"horizon": "8 steps" if resume else "4 steps", "micro_batch": 4},
        "schedule": {"kind": "constant"},
        "log": {"console": "off"},
    }
    rows = torch.randn(20, 3, generator=torch.Generator().manual_seed(1))
    data = (rows, (rows.sum(1) > 0).long())
    task = surefoot.ClassificationTask(2)
    settings |= parts.pop("settings", {})
    trainer = surefoot.Trainer(
        nn.Linear(3, 2), data, task, settings=settings, runs=tmp_path, **parts
    )
    return trainer.fit(resume=resume)


def test_another_order_than_before_is_refused(tmp_path: Path) -> None:
    first = fit_with(tmp_path, sampler=WeightedRandomSampler([1.0] * 20, 16))
    fit_with(tmp_path, first.folder, sampler=WeightedRandomSampler([1.0] * 20, 16))
    second = fit_with(tmp_path, sampler=WeightedRandomSampler([1.0] * 20, 16))
    changed = WeightedRandomSampler([2.0] + [1.0] * 19, 16)
    with pytest.raises(CheckpointError, match="the order of the samples has changed"):
        fit_with(tmp_path, second.folder, sampler=changed)


def test_an_own_part_and_a_kind_are_one_too_many(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"optimizer=torch.*RAdam is given, and the settings"):
        fit_with(
            tmp_path,
            optimizer=torch.optim.RAdam,
            settings={"optimizer": {"kind": "sgd", "lr": 0.1}},
        )


@pytest.mark.parametrize(
    ("parts", "error", "said"),
    [
        ({"optimiser": torch.optim.SGD}, TypeError, "did you mean optimizer"),
        ({"optimizer": torch.optim.SGD}, ConfigError, "add optimizer.lr"),
        ({"clip": nn.Linear}, RequestError, "call it: Linear"),
        (
            {"schedule": lambda n: 0.0, "settings": {"schedule": {}}},
            RequestError,
            "above 0 at the first update",
        ),
        ({"observers": [object()]}, RequestError, "has no such method"),
        ({"sampler": 7}, RequestError, "the sampler is a int"),
    ],
)
def test_what_cannot_be_used_is_refused_before_there_is_a_folder(
    parts: dict[str, Any], error: type[Exception], said: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=said):
        fit_with(tmp_path, **parts)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("path", "wrong", "said"),
    [
        ("observers", [{"kind": "counter", "arguments": {"begin": 1}}], "begin"),
        ("observers", [{"kind": "custom", "target": "builtins:object"}], "has no such method"),
        ("log", {"sinks": [{"kind": "losses", "arguments": {"digit": 3}}]}, "digit"),
        ("sampler", {"kind": "weighted", "arguments": {"weihgts": "x"}}, "weihgts"),
        ("optimizer", {"kind": "sign_descent", "lr": 0.1, "arguments": {"bta": 1}}, "bta"),
    ],
)
def test_what_a_recipe_names_wrongly_is_refused_before_there_is_a_folder(
    path: str, wrong: Any, said: str, tmp_path: Path
) -> None:
    given = {**recipe("name").as_dict(), path: wrong}
    with pytest.raises(RequestError, match=said):
        run_recipe(resolve_recipe(given), run_root=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_recipe_holds_no_given_part() -> None:
    given = recipe("name").as_dict()
    given["optimizer"] = {"kind": "given", "target": "mine:<lambda>", "lr": 0.1}
    with pytest.raises(ConfigError, match=r"optimizer\.kind .*kind=custom"):
        resolve_recipe(given)


def test_a_train_step_takes_own_parts_and_settings(tmp_path: Path) -> None:
    from outside_parts.training import ClipEachElement, SignDescent, halving

    settings = surefoot.Settings.model_validate(
        {
            "train": {"horizon": "10 steps", "micro_batch": 1},
            "optimizer": {"kind": "given", "target": "mine", "lr": 0.1},
        }
    )

    def made(seed: int) -> surefoot.TrainStep:
        torch.manual_seed(seed)
        return surefoot.TrainStep(
            nn.Linear(3, 2),
            surefoot.ClassificationTask(2),
            settings=settings,
            optimizer=SignDescent,
            schedule=halving,
            clip=ClipEachElement(0.1),
        )

    def train(step: surefoot.TrainStep, first: int, last: int) -> None:
        for n in range(first, last):
            rows = torch.randn(6, 3, generator=torch.Generator().manual_seed(n))
            step((rows, (rows.sum(1) > 0).long()))
        step.settle()

    whole, half, rest = made(0), made(0), made(1)
    train(whole, 0, 8)
    train(half, 0, 5)
    half.save(tmp_path)
    assert rest.resume(tmp_path) == 5
    train(rest, 5, 8)
    for one, other in zip(whole.model.parameters(), rest.model.parameters(), strict=True):
        assert torch.equal(one, other)
