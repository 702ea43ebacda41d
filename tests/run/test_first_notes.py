"""What a run says of itself before its first update and after it, and what it counts."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import surefoot
from parallel.small_runs import assembled
from surefoot import DatasetSource, Trainer
from surefoot.core.errors import ModelError, UserExitError
from surefoot.data.second_look import second_look
from surefoot.run.first_notes import notes_of

X = torch.arange(96.0).reshape(24, 4) / 96
Y = X.sum(1, keepdim=True)


def settings(horizon: str = "2 epochs", **sections: Any) -> dict[str, Any]:
    return {
        "train": {"horizon": horizon, "micro_batch": 8},
        "device": "cpu",
        "log": {"console": "off"},
        **sections,
    }


def rows(folder: Path | None, name: str) -> list[dict[str, Any]]:
    assert folder is not None
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def notes(folder: Path | None) -> list[str]:
    return [row["message"] for row in rows(folder, "events.jsonl") if row["kind"] == "note"]


def squares(model: nn.Module, batch: Any) -> Tensor:
    return (model(batch[0]) - batch[1]).square().sum()


def test_a_row_says_the_epoch_of_its_last_sample(tmp_path: Path) -> None:
    run = Trainer(
        nn.Linear(4, 1), (X, Y), surefoot.RegressionTask(), settings=settings(), runs=tmp_path
    ).fit()
    found = [(row["step"], row["epoch"]) for row in rows(run.folder, "metrics.jsonl")]
    assert found == [(1, 0), (2, 0), (3, 0), (4, 1), (5, 1), (6, 1)]


class TimeFirst(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gru, self.head = nn.GRU(4, 4), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.head(self.gru(x)[0][-1])
        return scores.squeeze(1)


def time_first(samples: Any) -> tuple[Tensor, Tensor]:
    return torch.stack([a for a, _ in samples], 1), torch.cat([b for _, b in samples])


def joined(samples: Any) -> dict[str, Tensor]:
    edges = [graph["edges"] + 5 * place for place, graph in enumerate(samples)]
    columns = {key: torch.cat([graph[key] for graph in samples]) for key in ("x", "y")}
    return {"edges": torch.cat(edges, 1), **columns}


def of_graphs(model: nn.Module, batch: Any) -> Tensor:
    return (model(batch["x"]).view(-1, 5).mean(1) - batch["y"]).square().sum()


SERIES = [(torch.full((6, 4), i / 24), torch.tensor([i / 24])) for i in range(24)]
GRAPHS = [
    {"edges": torch.arange(14).reshape(2, 7) % 5, "x": torch.full((5, 4), i / 24), "y": X[i, :1]}
    for i in range(24)
]


@pytest.mark.parametrize(
    ("model", "samples", "collate", "loss"),
    [(TimeFirst(), SERIES, time_first, squares), (nn.Linear(4, 1), GRAPHS, joined, of_graphs)],
)
def test_samples_are_counted_where_they_are_fetched(
    model: nn.Module, samples: Any, collate: Any, loss: Any, tmp_path: Path
) -> None:
    data = DatasetSource(samples, collate=collate)
    trainer = Trainer(
        model, data, loss, validation=data, settings=settings("1 epochs"), runs=tmp_path
    )
    run = trainer.fit()
    first = rows(run.folder, "metrics.jsonl")[0]
    assert first["weight"] == 8 and first["samples"] == 8
    evaluated = rows(run.folder, "metrics.jsonl")[-1]
    assert evaluated["row"] == "eval" and evaluated["weight"] == 24


class HalfUsed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.idle = nn.Linear(4, 1), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.used(x)
        return scores


def test_a_parameter_without_a_gradient_is_named_once(tmp_path: Path) -> None:
    run = Trainer(HalfUsed(), (X, Y), squares, settings=settings(), runs=tmp_path).fit()
    (said,) = (note for note in notes(run.folder) if "no gradient" in note)
    assert "2 of 4 trainable parameters" in said and "idle.weight, idle.bias" in said
    whole = Trainer(nn.Linear(4, 1), (X, Y), squares, settings=settings(), runs=tmp_path).fit()
    assert not any("no gradient" in note for note in notes(whole.folder))


def test_why_there_is_no_utilization_is_said() -> None:
    with closing(assembled("classifier", settings())) as assembly:
        assert not [note for note in notes_of(assembly) if "utilization" in note]
        pace = replace(assembly.pace, flops_unknown="a stream is not read ahead")
        (note,) = (n for n in notes_of(replace(assembly, pace=pace)) if "utilization" in n)
    assert note.endswith("were not counted: a stream is not read ahead")


def test_a_step_refuses_a_model_in_evaluation_mode() -> None:
    model = nn.Sequential(nn.Linear(4, 1), nn.Dropout(0.5))
    step = surefoot.TrainStep(model, squares, settings={"train": {"horizon": "4 steps"}})
    step((X, Y))
    model.eval()
    with pytest.raises(ModelError, match="evaluation mode"):
        step((X, Y))
    model.train()
    step((X, Y))


class Unsteady:
    """Draws from a generator of its own, which nobody seeds."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(0)

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Any:
        return X[index] + torch.rand(4, generator=self.generator), Y[index]


class Augmented(Unsteady):
    """Draws from torch's generator, which is seeded for each sample."""

    def __getitem__(self, index: int) -> Any:
        return X[index] + torch.rand(4), Y[index]


def test_a_data_set_that_is_another_one_each_time_is_named(tmp_path: Path) -> None:
    assert list(second_look(DatasetSource(Augmented()))) == []
    run = Trainer(nn.Linear(4, 1), Unsteady(), squares, settings=settings(), runs=tmp_path).fit()
    (said,) = (note for note in notes(run.folder) if "another one each time" in note)
    assert said.startswith("sample 0 of training data")


def leave(*_: Any) -> Any:
    raise SystemExit(0)


class LeavesLate(nn.Linear):
    """Its forward ends the process, so it thinks, in the second update."""

    calls = 0

    def forward(self, input: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
        return leave() if self.calls > 1 else super().forward(input)


class LeavingObserver:
    def on_step(self, report: Any) -> None:
        leave()


def leaving_loss(model: nn.Module, batch: Any) -> Tensor:
    return squares(model, batch) if len(batch[0]) != 8 else leave()


@pytest.mark.parametrize(
    "given",
    [
        lambda: {"model": LeavesLate(4, 1)},
        lambda: {"task": leaving_loss},
        lambda: {"observers": [LeavingObserver()]},
        lambda: {"validation": (X, Y), "metrics": {"m": leave}},
    ],
    ids=["model", "loss", "observer", "metric"],
)
def test_code_that_exits_fails_the_run(given: Callable[[], dict[str, Any]], tmp_path: Path) -> None:
    parts = {"model": nn.Linear(4, 1), "task": squares, **given()}
    trainer = Trainer(data=(X, Y), settings=settings(), runs=tmp_path, **parts)
    with pytest.raises(UserExitError, match=r"called sys.exit\(0\)") as caught:
        trainer.fit()
    assert Path(__file__).name in caught.value.where
    (folder,) = tmp_path.iterdir()
    assert rows(folder, "events.jsonl")[-1]["kind"] == "failure"


class LeavesAtStart(nn.Linear):
    """Ends the process, so it thinks, while it is looked at before the run begins."""

    def named_modules(self, *args: Any, **settings: Any) -> Any:
        return leave()


def test_code_that_exits_before_the_run_begins_is_an_error_too(tmp_path: Path) -> None:
    trainer = Trainer(LeavesAtStart(4, 1), (X, Y), squares, settings=settings(), runs=tmp_path)
    with pytest.raises(UserExitError, match=r"called sys.exit\(0\)"):
        trainer.fit()
