"""The command as a person meets it: help, typos, exit codes, errors with and without traceback."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from surefoot.cli import main as command
from surefoot.cli.failure import EXIT_INTERRUPTED
from surefoot.core.errors import (
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_REQUEST,
    EXIT_STOPPED,
    CheckpointError,
    ConfigError,
    MissingDataError,
    StopRequested,
    SurefootError,
    Violation,
)
from surefoot.observe.readers import runs as observed_runs

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def raising(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., int]:
    """Runs `surefoot runs` with an error in its midst."""

    def run(error: BaseException, *options: str) -> int:
        def raise_it(_: Path) -> None:
            raise error

        monkeypatch.setattr(observed_runs, "list_runs", raise_it)
        return command.invoke(["runs", str(tmp_path), *options])

    return run


def test_alone_it_prints_its_help(capsys: Capture) -> None:
    assert command.invoke([]) == EXIT_DONE
    out = capsys.readouterr().out
    for verb in ("train", "show", "runs", "checkpoint"):
        assert verb in out


def test_python_dash_m_is_the_same_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "surefoot", "--version"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == EXIT_DONE
    assert done.stdout.split()[0] == "surefoot"
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("arguments", "answer"),
    [
        (["trian"], "Did you mean 'train'"),
        (["show", "paramz"], "Did you mean 'params'"),
        (["checkpoint", "inspet"], "Did you mean 'inspect'"),
        (["train", "--resum", "x"], "no such option --resum; did you mean --resume?"),
        (["train", "--acept-change", "x"], "did you mean --accept-change?"),
        (["train", "--learning-rate", "1"], "--set section.key=value"),
        (["runs", "--what"], "no such option --what"),
        (["train", "--nproc", "0"], "--nproc"),
        (["train", "--json"], "--json"),
        (["runs", "--json", "nowhere/answer.json"], "folder nowhere does not exist"),
    ],
)
def test_a_typo_is_answered_with_what_was_meant(
    arguments: list[str], answer: str, capsys: Capture
) -> None:
    assert command.invoke(arguments) == EXIT_REQUEST
    captured = capsys.readouterr()
    assert answer in captured.err
    assert "--help" in captured.err
    assert "Traceback" not in captured.err
    assert captured.out == ""


def test_a_mesh_of_other_ranks_is_refused_before_any_starts(capsys: Capture) -> None:
    arguments = ["train", "--nproc", "2", "--set", "parallel.shard=3"]
    assert command.invoke(arguments) == EXIT_REQUEST
    err = capsys.readouterr().err
    assert "does not make 2 ranks" in err
    assert "do: use parallel.shard=" in err


@pytest.mark.parametrize(
    ("arguments", "answer"),
    [
        (["train", "--accept-change", "seed"], "--accept-change is given without --resume"),
        (["train", "--dry-run", "--resume", "x"], "--dry-run is given with --resume"),
    ],
)
def test_what_cannot_be_meant_is_refused(
    arguments: list[str], answer: str, capsys: Capture
) -> None:
    assert command.invoke(arguments) == EXIT_REQUEST
    assert answer in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (SurefootError("x"), EXIT_FAILED),
        (CheckpointError("x"), EXIT_FAILED),
        (MissingDataError("x"), EXIT_REQUEST),
        (ConfigError([Violation("a.b", "override", "unknown key")]), EXIT_REQUEST),
        (StopRequested("x"), EXIT_STOPPED),
        (ZeroDivisionError("x"), EXIT_FAILED),
        (KeyboardInterrupt(), EXIT_INTERRUPTED),
        (SystemExit(0), EXIT_FAILED),
        (SystemExit(EXIT_STOPPED), EXIT_FAILED),
    ],
)
def test_each_error_has_its_exit_code(
    error: BaseException, code: int, raising: Callable[..., int]
) -> None:
    assert raising(error) == code


def test_our_errors_say_what_where_rule_remedy_and_show_no_traceback(
    raising: Callable[..., int], capsys: Capture
) -> None:
    raising(SurefootError("it broke [red]", where="a.b", rule="never", remedy="mend it"))
    assert capsys.readouterr().err.splitlines() == [
        "error: it broke [red]",
        "  where: a.b",
        "  rule: never",
        "  do: mend it",
    ]


def test_debug_adds_the_traceback(raising: Callable[..., int], capsys: Capture) -> None:
    raising(SurefootError("it broke"), "--debug")
    err = capsys.readouterr().err
    assert "Traceback" in err
    assert "error: it broke" in err


def test_an_unforeseen_error_shows_its_traceback(
    raising: Callable[..., int], capsys: Capture
) -> None:
    raising(ZeroDivisionError("by nothing"))
    err = capsys.readouterr().err
    assert "raise_it" in err
    assert "error: ZeroDivisionError: by nothing" in err


def test_errors_are_in_the_json_answer(
    raising: Callable[..., int], tmp_path: Path, capsys: Capture
) -> None:
    violation = Violation("a.b", "override", "unknown key", "did you mean a.c?")
    target = tmp_path / "answer.json"
    raising(ConfigError([violation]), "--json", str(target))
    answer = json.loads(target.read_text(encoding="utf-8"))
    assert answer["exit_code"] == EXIT_REQUEST
    assert answer["error"]["kind"] == "ConfigError"
    assert answer["error"]["violations"] == [
        {
            "path": "a.b",
            "origin": "override",
            "rule": "unknown key",
            "remedy": "did you mean a.c?",
        }
    ]


def test_a_reader_that_stops_reading_gets_no_noise(tmp_path: Path) -> None:
    done = subprocess.run(
        f"{sys.executable} -m surefoot --help | head -c 5",
        shell=True,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stderr == ""
