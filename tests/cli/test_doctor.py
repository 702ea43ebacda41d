"""`surefoot doctor`: text, JSON and exit codes; and on a run folder of our own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from surefoot.cli import main as command
from surefoot.core.errors import EXIT_DONE, EXIT_FOUND, EXIT_REQUEST

Capture = pytest.CaptureFixture[str]


def overfit(path: Path) -> Path:
    lines = ["step,loss,val_loss"]
    for n in range(100):
        validation = 1 + 1 / (1 + n) + 0.01 * max(0, n - 40) if n % 5 == 0 else ""
        lines.append(f"{n},{2 * 0.97**n},{validation}")
    path.write_text("\n".join(lines))
    return path


def test_a_finding_comes_with_evidence_and_fix(tmp_path: Path, capsys: Capture) -> None:
    path = overfit(tmp_path / "log.csv")
    assert command.invoke(["doctor", str(path)]) == EXIT_DONE
    text = capsys.readouterr().out
    assert "1. warning SFD501 overfitting (strong)" in text
    assert "step 40" in text
    assert "fix: " in text
    assert "not recorded, so not checked" in text
    assert "surefoot show causes SFD501" in text


def test_json_says_the_same(tmp_path: Path, capsys: Capture) -> None:
    path = overfit(tmp_path / "log.csv")
    assert command.invoke(["doctor", str(path), "--json", "-"]) == EXIT_DONE
    facts: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert facts["healthy"] is False
    assert [finding["slug"] for finding in facts["findings"]] == ["overfitting"]
    assert facts["findings"][0]["evidence"]["best_step"] == 40
    assert "vanishing-gradients" in facts["not_recorded"]["grad_norm"]
    assert facts["rows"] == 100


def test_an_error_is_exit_code_one(tmp_path: Path, capsys: Capture) -> None:
    rows = [{"step": n, "loss": 2.0 if n < 20 else "NaN"} for n in range(30)]
    path = tmp_path / "log.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows))
    assert command.invoke(["doctor", str(path)]) == EXIT_FOUND
    assert "non-finite" in capsys.readouterr().out


def test_a_healthy_log(tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "log.csv"
    path.write_text("step,loss\n" + "".join(f"{n},{2 / (1 + n / 10)}\n" for n in range(100)))
    assert command.invoke(["doctor", str(path)]) == EXIT_DONE
    assert "nothing wrong was found in what was recorded" in capsys.readouterr().out


def test_a_log_too_short_is_said_to_be(tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "log.csv"
    path.write_text("step,loss\n0,2\n1,1\n")
    assert command.invoke(["doctor", str(path)]) == EXIT_DONE
    text = capsys.readouterr().out
    assert "too few to judge the curves" in text
    assert "nothing wrong" not in text


def test_what_is_not_there_is_a_wrong_request(tmp_path: Path, capsys: Capture) -> None:
    assert command.invoke(["doctor", str(tmp_path / "none")]) == EXIT_REQUEST


def test_a_run_folder_and_its_rules(recipe: str, tmp_path: Path, capsys: Capture) -> None:
    words = ["--set", "optimizer.lr=1e-9", "--set", "log.weight_norm_every=5 steps"]
    words += ["--set", "train.horizon=60 steps", "--runs", str(tmp_path / "runs")]
    assert command.invoke(["train", recipe, *words]) == EXIT_DONE
    run = next((tmp_path / "runs").iterdir())
    capsys.readouterr()
    command.invoke(["doctor", str(run), "--json", "-"])
    facts: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert facts["format"] == "run folder"
    assert facts["findings"][0]["slug"] == "rate-too-low"
    assert command.invoke(["show", "rules", "rate-too-low"]) == EXIT_DONE
    assert "SFD104" in capsys.readouterr().out
