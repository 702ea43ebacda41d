"""What an installed package brings is listed, and wrong names of it are answered with the right."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from surefoot.cli import main as command
from surefoot.cli.show_parts import SHELVES
from surefoot.config.load import resolve_settings
from surefoot.core.doors import Door, brought, label_of
from surefoot.core.errors import EXIT_DONE, ConfigError

pytestmark = pytest.mark.usefixtures("installed")
BROUGHT = {
    "optimizers": "sign_descent",
    "schedules": "halving",
    "clips": "each_element",
    "samplers": "every_other",
    "tasks": "margin",
    "metrics": "mean_output",
    "sources": "larger_of_two",
    "observers": "counter",
    "sinks": "losses",
}
TRAIN = {"horizon": "4 steps", "micro_batch": 4}


def test_one_part_comes_in_by_each_door() -> None:
    doors = {door.value.rpartition(".")[2]: list(brought(door)) for door in Door}
    assert {word: names for word, names in doors.items() if word in BROUGHT} == {
        word: [name] for word, name in BROUGHT.items()
    }
    assert set(SHELVES) | {"optimizers"} == set(BROUGHT)


@pytest.mark.parametrize("word", BROUGHT)
def test_show_lists_it_with_its_origin(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.invoke(["show", word, "--json", "-"]) == EXIT_DONE
    rows = json.loads(capsys.readouterr().out)[word]
    (theirs,) = [row for row in rows if row["from"] != "surefoot"]
    assert theirs["name"] == BROUGHT[word]
    assert theirs["from"] == "outside-parts 1.2.0"
    assert theirs["what"].endswith(".")


def test_a_kind_is_answered_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match=r"optimizer\.kind .*did you mean 'sign_descent'"):
        resolve_settings({"train": TRAIN, "optimizer": {"kind": "sign_decent", "lr": 0.1}})
    with pytest.raises(ConfigError, match=r"sampler\.kind .*did you mean 'every_other'"):
        resolve_settings({"train": TRAIN, "sampler": {"kind": "every_othr"}})
    with pytest.raises(ConfigError, match=r"observers\.0\.kind .*did you mean 'counter'"):
        resolve_settings({"train": TRAIN, "observers": [{"kind": "conter"}]})


def test_a_part_by_name_says_whose_it_is() -> None:
    settings = resolve_settings({"train": TRAIN, "schedule": {"kind": "halving"}}).config
    assert label_of(Door.SCHEDULES, settings.schedule) == (
        "outside_parts.training:halving (outside-parts 1.2.0)"
    )


def test_without_the_package_its_names_are_unknown(
    installed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry != str(installed)])
    with pytest.raises(ConfigError, match=r"unknown kind 'halving'"):
        resolve_settings({"train": TRAIN, "schedule": {"kind": "halving"}})


@pytest.mark.parametrize(
    ("word", "code"), [("rules", "OUT01"), ("causes", "OUT02")], ids=["rule", "cause"]
)
def test_show_lists_rules_and_causes(
    word: str, code: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.invoke(["show", word]) == EXIT_DONE
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith(code)]
    assert "outside-parts" in line


def test_the_rule_is_used_by_the_audit(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import torch\nfrom torch import nn\n\n"
        "model = nn.Linear(4, 1)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.01)\n"
        "for _ in range(10):\n"
        "    optimizer.zero_grad()\n"
        "    model(torch.randn(8, 4)).square().mean().backward()\n"
        "    optimizer.step()\n"
    )
    found = tmp_path / "found.json"
    words = [sys.executable, "-m", "surefoot", "audit", "--json", str(found), str(script)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300)
    assert done.returncode == EXIT_DONE, done.stdout + done.stderr
    (finding,) = [f for f in json.loads(found.read_text())["findings"] if f["code"] == "OUT01"]
    assert (finding["slug"], finding["line"]) == ("unclipped-update", 9)


def test_the_cause_is_asked_by_the_doctor(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [f"{step},{2 * 0.98**step + 0.2},0.01" for step in range(200)]
    log = tmp_path / "log.csv"
    log.write_text("\n".join(["step,loss,lr", *rows]) + "\n")
    command.invoke(["doctor", str(log)])
    assert "The rate is 0.01 in all 200 rows" in " ".join(capsys.readouterr().out.split())
