"""Formats of other tools, read by what they hold: losses, rates, steps; and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from surefoot.cli import main as command
from surefoot.core.errors import EXIT_DONE, EXIT_REQUEST
from surefoot.diagnosis.doctor import examine
from surefoot.diagnosis.readers import read_recording
from surefoot.diagnosis.recording import Objective, Recording

COUNT = 20
LOSS = [round(2 * 0.9**n + 0.5, 4) for n in range(COUNT)]
EVERY = range(COUNT)


def lines(*parts: str) -> str:
    return "\n".join(parts) + "\n"


def dumped(rows: list[dict[str, Any]]) -> str:
    return lines(*map(json.dumps, rows))


# name of the file, its text, and the steps of the losses
FORMATS: dict[str, tuple[str, str, list[int]]] = {
    "history of lists": (
        "history.json",
        json.dumps({"loss": LOSS, "accuracy": [0.1] * COUNT, "val_loss": LOSS}),
        list(EVERY),
    ),
    "list of rows": (
        "log.json",
        json.dumps([{"iteration": 10 * n, "loss": LOSS[n], "eval_loss": LOSS[n]} for n in EVERY]),
        [10 * n for n in EVERY],
    ),
    "several losses with their sum": (
        "metrics.json",
        dumped(
            [
                {"iteration": 20 * n + 19, "total_loss": LOSS[n], "loss_cls": 0.1, "loss_box": 0.2}
                for n in EVERY
            ]
        ),
        [20 * n + 19 for n in EVERY],
    ),
    "iterations that begin anew with each epoch": (
        "a.log.json",
        dumped(
            [{"env": "a machine"}]
            + [
                {"mode": "train", "epoch": 1 + n // 5, "iter": 50 * (1 + n % 5), "loss": LOSS[n]}
                for n in EVERY
            ]
        ),
        [50 * (n + 1) for n in EVERY],
    ),
    "one object an epoch": (
        "log.txt",
        dumped([{"train_loss": LOSS[n], "test_loss": 1.0, "epoch": n} for n in EVERY]),
        list(EVERY),
    ),
    "lines with train and validation": (
        "out.txt",
        lines(
            "number of parameters: 10.65M",
            *(f"step {50 * n}: train loss {LOSS[n]:.4f}, val loss 3.0" for n in EVERY),
        ),
        [50 * n for n in EVERY],
    ),
    "such lines alone": (
        "out.txt",
        lines(*(f"step {50 * n}: train loss {LOSS[n]:.4f}, val loss 3.0000" for n in EVERY)),
        [50 * n for n in EVERY],
    ),
    "lines with bars": (
        "main.log",
        lines(
            *(f"step {n + 1:4d}/20 | loss {LOSS[n]:.4f} (+0.1z)| norm 1.2 (+0z)| lr 1e-03 | 9 ms"
              for n in EVERY)
        ),
        [n + 1 for n in EVERY],
    ),
    "brackets of epochs and steps": (
        "train.out",
        lines(
            *(f"Epoch [{1 + n // 10}/2], Step [{100 * (1 + n % 10)}/1000], Loss: {LOSS[n]:.4f}"
              for n in EVERY)
        ),
        [100 * (n + 1) for n in EVERY],
    ),
    "printed mappings": (
        "slurm-1.out",
        lines(
            "  0%|          | 0/20 [00:00<?, ?it/s]",
            *(f"{{'loss': {LOSS[n]}, 'grad_norm': 1.5, 'learning_rate': 5e-05, 'epoch': {n / 8}}}"
              for n in EVERY),
            "{'train_runtime': 10.0, 'train_loss': 99.0, 'epoch': 2.5}",
        ),
        list(EVERY),
    ),
    "rows of a tuner": (
        "trainer_log.jsonl",
        dumped([{"current_steps": 5 * n, "total_steps": 95, "loss": LOSS[n]} for n in EVERY]),
        [5 * n for n in EVERY],
    ),
    "an exported scalar": (
        "run-a-tag-train_loss.csv",
        lines("Wall time,Step,Value", *(f"1700000000.0,{10 * n},{LOSS[n]}" for n in EVERY)),
        [10 * n for n in EVERY],
    ),
    "an exported chart": (
        "chart.csv",
        lines(
            '"Step","run-7 - train/loss","run-7 - train/loss__MIN","run-7 - train/loss__MAX"',
            *(f'"{n}","{LOSS[n]}","{LOSS[n]}","{LOSS[n]}"' for n in EVERY),
        ),
        list(EVERY),
    ),
    "an odd name": (
        "log.csv",
        lines("epoch,trainloss,avg_val_loss", *(f"{n},{LOSS[n]},1.0" for n in EVERY)),
        list(EVERY),
    ),
}  # fmt: skip


def recorded(name: str, text: str, folder: Path) -> Recording:
    (folder / name).write_text(text)
    return read_recording(folder / name)


@pytest.mark.parametrize("kind", FORMATS)
def test_losses_and_steps_are_read(kind: str, tmp_path: Path) -> None:
    name, text, steps = FORMATS[kind]
    recording = recorded(name, text, tmp_path)
    assert recording["loss"].values.tolist() == pytest.approx(LOSS)
    assert recording["loss"].steps.tolist() == steps
    assert examine(recording).has_loss


def test_the_suffix_does_not_matter(tmp_path: Path) -> None:
    for kind in ("history of lists", "an odd name", "one object an epoch"):
        recording = recorded("noname.log", FORMATS[kind][1], tmp_path)
        assert recording["loss"].values.tolist() == pytest.approx(LOSS)


def test_parts_of_a_loss_are_added_up(tmp_path: Path) -> None:
    text = lines(
        "        epoch,   train/box_loss,   train/cls_loss,   val/box_loss,   val/cls_loss",
        *(f"        {n},     {LOSS[n]},         {2 * LOSS[n]},      1.0,       0.5" for n in EVERY),
    )
    recording = recorded("results.csv", text, tmp_path)
    assert recording["loss"].values.tolist() == pytest.approx([3 * value for value in LOSS])
    assert recording.validation[0] == "val"
    assert recording.validation[1].values.tolist() == [1.5] * COUNT


def test_losses_of_several_validation_sets_stand_for_themselves(tmp_path: Path) -> None:
    rows = [
        {"step": n, "loss": LOSS[n], "eval_books_loss": 1.0, "eval_code_loss": 2.0} for n in EVERY
    ]
    recording = recorded("a.jsonl", dumped(rows), tmp_path)
    assert {"eval books/loss", "eval code/loss"} <= recording.evaluations.keys()
    assert recording.validation[1].values.tolist() == [1.0] * COUNT


PLAYERS = (
    lines("Epoch,Batch,Gen Loss,Disc Loss", *(f"{n // 5},{40 * (n % 5)},0.7,1.38" for n in EVERY)),
    lines(
        "================ Training Loss (Mon Jan  1 00:00:00 2024) ================",
        *(f"(epoch: {1 + n // 5}, iters: {100 * (1 + n % 5)}, time: 0.1, data: 0.2) D_A: 0.2 G_A: 1"
          for n in EVERY),
    ),
)  # fmt: skip


@pytest.mark.parametrize("text", PLAYERS)
def test_losses_of_two_players_are_read_and_not_judged(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recording = recorded("loss_log.txt", text, tmp_path)
    assert recording.objective is Objective.GAME
    assert not recording.has("loss")
    assert len([name for name in recording.columns if name.startswith("loss/")]) == 2
    assert len(set(recording["step"].steps.tolist())) == COUNT
    assert command.invoke(["doctor", str(tmp_path / "loss_log.txt")]) == EXIT_DONE
    text = capsys.readouterr().out
    assert "the losses of players that train against each other" in text
    assert "nothing wrong" not in text


def test_the_loss_of_a_policy_gradient_is_not_judged(tmp_path: Path) -> None:
    """It may rise, fall below zero and stand at nothing: the reward counts."""
    rows = [{"step": n, "loss": -7 if n % 3 else 5 / (n + 1), "reward": n / 10} for n in range(200)]
    found = examine(recorded("a.jsonl", dumped(rows), tmp_path))
    assert not found.findings
    assert not found.judges_loss
    (tmp_path / "a.jsonl").write_text(dumped([*rows, {"step": 200, "loss": "NaN", "reward": 1.0}]))
    assert examine(read_recording(tmp_path / "a.jsonl")).findings


def test_nothing_wrong_is_said_only_where_a_loss_was_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "log.csv"
    log.write_text(lines("step,lr,wibble", *(f"{n},0.001,{LOSS[n]}" for n in EVERY)))
    assert command.invoke(["doctor", str(log)]) == EXIT_REQUEST
    told = capsys.readouterr()
    assert "no loss was read" in told.err + told.out
    assert "wibble" in told.err + told.out
    assert "nothing wrong" not in told.out


def test_a_binary_file_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "log.bin").write_bytes(b"\x00\x01\x02" * 100)
    assert command.invoke(["doctor", str(tmp_path / "log.bin")]) == EXIT_REQUEST
