"""Contracts from the command: refused before, enforced during, judged after; exit codes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from surefoot.cli import main as command
from surefoot.core.errors import EXIT_DONE, EXIT_FOUND, EXIT_REQUEST
from surefoot.observe.events import read_events
from surefoot.state.checkpoint import list_checkpoints, read_checkpoint

Capture = pytest.CaptureFixture[str]
CONTRACT = ["contract.kind=research", "contract.task=write"]


def train(recipe: str, root: Path, *sets: str, more: tuple[str, ...] = ()) -> tuple[int, Any]:
    answer = root / "answer.json"
    root.mkdir(exist_ok=True)
    words = [word for value in ("log.console=off", *sets) for word in ("--set", value)]
    code = command.invoke(
        ["train", recipe, "--runs", str(root), "--json", str(answer), *words, *more]
    )
    return code, json.loads(answer.read_text())


def test_a_budget_of_0_002_device_hours_stops_with_a_checkpoint(
    recipe: str, tmp_path: Path, capsys: Capture
) -> None:
    budget = "contract.budget.device_hours=0.002"
    code, answer = train(
        recipe, tmp_path / "runs", *CONTRACT, budget, "train.horizon=10_000_000 steps"
    )
    assert code == EXIT_FOUND
    assert answer["status"] == "stopped"
    assert answer["verdict"]["standing"] == "broken"
    (clause,) = [c for c in answer["verdict"]["clauses"] if c["name"] == "budget.device_hours"]
    assert clause["standing"] == "broken"
    assert "it ended the run at update" in clause["found"]
    folder = Path(answer["folder"])
    kinds = [event.kind for event in read_events(folder / "events.jsonl")]
    assert "budget" in kinds and kinds[-1] == "stopped"
    newest = list_checkpoints(folder / "checkpoints")[-1]
    manifest, _ = read_checkpoint(newest)
    assert manifest.step == answer["step"]
    assert "broken: budget.device_hours" in capsys.readouterr().out
    # With nothing left it stops again at once; with more, accepted by name, it goes on.
    code, again = train(
        recipe,
        tmp_path / "runs",
        *CONTRACT,
        budget,
        "train.horizon=10_000_000 steps",
        more=("--resume", str(folder)),
    )
    assert code == EXIT_FOUND
    assert again["step"] <= answer["step"] + 2
    more = (
        "--resume",
        str(folder),
        "--accept-change",
        "contract",
        "--accept-change",
        "train",
        "--accept-change",
        "schedule",
    )
    end = answer["step"] + 20
    code, _ = train(
        recipe,
        tmp_path / "runs",
        *CONTRACT,
        "contract.budget.device_hours=1",
        # The decay ends elsewhere: to the rule of the contract this is another run.
        "contract.resume=T3",
        f"train.horizon={end} steps",
        more=more,
    )
    assert code == EXIT_DONE


def test_a_run_that_keeps_its_contract_is_well(
    recipe: str, tmp_path: Path, capsys: Capture
) -> None:
    code, answer = train(recipe, tmp_path / "runs", *CONTRACT, "contract.target=1e9")
    assert code == EXIT_DONE
    assert answer["verdict"]["standing"] == "held"
    assert Path(answer["report"]).is_file()
    assert command.invoke(["runs", str(tmp_path / "runs")]) == EXIT_DONE
    assert "held" in capsys.readouterr().out


def test_a_missed_target_is_found(recipe: str, tmp_path: Path) -> None:
    code, answer = train(recipe, tmp_path / "runs", *CONTRACT, "contract.target=0.001")
    assert code == EXIT_FOUND
    assert answer["status"] == "finished"


def test_a_slice_that_got_worse_is_found_though_the_target_is_reached(
    recipe: str, tmp_path: Path
) -> None:
    _, first = train(recipe, tmp_path / "runs")
    baseline = f"contract.baseline={first['folder']}"
    slices = "contract.slices=[{metric: validation/loss, direction: min, allowed_regression: 0.01}]"
    # The same run again neither wins nor loses; a worse one is told though its target is reached.
    code, _ = train(recipe, tmp_path / "runs", *CONTRACT, baseline, slices)
    assert code == EXIT_DONE
    code, answer = train(
        recipe,
        tmp_path / "runs",
        *CONTRACT,
        baseline,
        slices,
        "contract.target=1e9",
        "train.horizon=2 steps",
        "schedule.warmup=1",
    )
    assert code == EXIT_FOUND
    standings = {c["name"]: c["standing"] for c in answer["verdict"]["clauses"]}
    assert standings["target"] == "held"
    assert standings["slices.validation/loss"] == "broken"


@pytest.mark.parametrize(
    "sets",
    [
        ["contract.baseline=nowhere"],
        ["contract.metric=other/loss", "contract.direction=min"],
    ],
)
def test_what_could_not_be_judged_is_refused_and_leaves_no_trace(
    recipe: str, tmp_path: Path, sets: list[str]
) -> None:
    code, answer = train(recipe, tmp_path / "runs", *CONTRACT, *sets)
    assert code == EXIT_REQUEST
    assert "error" in answer
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["answer.json"]


def test_the_metric_of_the_contract_decides(recipe: str, tmp_path: Path) -> None:
    sets = [*CONTRACT, "contract.metric=validation/accuracy", "contract.direction=max"]
    code, answer = train(recipe, tmp_path / "runs", *sets)
    assert code == EXIT_DONE
    record = json.loads((Path(answer["folder"]) / "record.json").read_text())
    deciding = {"set": "validation", "name": "accuracy", "direction": "max"}
    assert record["extra"]["deciding_metric"] == deciding


def test_compare_of_two_seeds_says_no_difference_shown(
    recipe: str, tmp_path: Path, capsys: Capture
) -> None:
    folders = [train(recipe, tmp_path / "runs", f"seed={n}")[1]["folder"] for n in range(2)]
    page = tmp_path / "both.html"
    assert command.invoke(["compare", *folders, "--html", str(page)]) == EXIT_DONE
    assert "no difference shown" in capsys.readouterr().out
    assert "No difference shown" in page.read_text()
    assert command.invoke(["compare", folders[0]]) == EXIT_REQUEST
