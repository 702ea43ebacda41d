"""What `Trainer`, `TrainStep` and the user's own code refuse, and what the refusal says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import surefoot
from surefoot.cli import main as command
from surefoot.core.errors import (
    EXIT_REQUEST,
    ConfigError,
    DataError,
    ModelError,
    RequestError,
    SurefootError,
)
from surefoot.core.targets import call_target, import_target

INPUTS = torch.arange(64.0).reshape(16, 4) / 64
LABELS = torch.arange(16) % 3
TASK = surefoot.ClassificationTask(3)
SETTINGS: dict[str, Any] = {
    "train": {"horizon": "4 steps", "micro_batch": 4},
    "log": {"console": "off"},
}


def trainer(model: Any = None, data: Any = None, task: Any = TASK, **more: Any) -> surefoot.Trainer:
    more = {"settings": SETTINGS, **more}
    return surefoot.Trainer(model or nn.Linear(4, 3), data or (INPUTS, LABELS), task, **more)


@pytest.mark.parametrize(
    ("given", "kind", "said"),
    [
        ({"model": nn.Linear}, RequestError, "the class Linear"),
        ({"task": surefoot.ClassificationTask}, RequestError, "ClassificationTask(...)"),
        ({"task": nn.CrossEntropyLoss()}, RequestError, "a CrossEntropyLoss"),
        ({"task": "classification"}, RequestError, "a str"),
        ({"data": DataLoader(TensorDataset(INPUTS, LABELS))}, DataError, "loader.dataset"),
        ({"settings": {"train.horizon": "4 steps"}}, ConfigError, "{'train': {'horizon': ...}}"),
        ({"settings": {}}, ConfigError, "add train.horizon and train.micro_batch"),
    ],
)
def test_what_cannot_be_trained_is_refused(
    given: dict[str, Any], kind: type[SurefootError], said: str
) -> None:
    with pytest.raises(kind, match=re.escape(said)):
        trainer(**given)


def test_a_metric_that_is_a_mean_is_refused() -> None:
    made = trainer(
        validation=(INPUTS, LABELS), metrics={"mean": lambda model, batch: torch.ones(())}
    )
    with pytest.raises(ModelError, match="numerator, denominator"):
        made.evaluate()


def test_a_window_is_the_batches_of_one_call() -> None:
    accumulating = {"train": {"horizon": "4 steps", "accumulation": 4}}
    with pytest.raises(RequestError, match=re.escape("step(first, second, third, fourth)")):
        surefoot.TrainStep(nn.Linear(4, 3), TASK, settings=accumulating)
    step = surefoot.TrainStep(nn.Linear(4, 3), TASK, settings={"train": {"horizon": "4 steps"}})
    with pytest.raises(RequestError, match="without a batch"):
        step()


def test_a_run_begun_in_python_is_resumed_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = trainer(runs=tmp_path).fit()
    assert "Linear" not in repr(run)
    assert command.invoke(["train", "--resume", str(run.folder)]) == EXIT_REQUEST
    assert f'trainer.fit(resume="{run.folder}")' in capsys.readouterr().err
    assert command.invoke(["checkpoint", "inspect", str(run.folder)]) == 0
    assert f'trainer.fit(resume="{run.folder}")' in capsys.readouterr().out
    with pytest.raises(RequestError, match="model=M"):
        surefoot.load(run.folder)
    with pytest.raises(RequestError, match=re.escape("accept=[FIELD]")):
        trainer(settings={**SETTINGS, "seed": 1}).fit(resume=run.folder)


def test_the_last_update_of_an_epoch_lasts_as_long_as_it_did(tmp_path: Path) -> None:
    import time

    def slow(model: nn.Module, batch: Any) -> torch.Tensor:
        time.sleep(0.02)
        return model(batch[0]).square().sum()

    step = surefoot.TrainStep(nn.Linear(4, 3), slow, settings={"train": {"horizon": "4 steps"}})
    for _ in range(2):
        step((INPUTS, LABELS))
    report = step.settle()
    assert report is not None
    assert report.step_seconds >= 0.02


def test_own_code_is_found_where_the_command_is_called(tmp_path: Path) -> None:
    (tmp_path / "mine_alone.py").write_text("def build():\n    return [1]\n")
    code = (
        "import sys; sys.path = [p for p in sys.path if p]; sys.argv = ['surefoot', '--version'];"
        "from surefoot.cli.main import main\n"
        "try: main()\nexcept SystemExit: import mine_alone"
    )
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True, capture_output=True)


def test_own_code_that_does_not_fit_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_code_here.py").write_text("def build(size):\n    return [size]\n")
    (tmp_path / "own_code_broken.py").write_text("import no_such_package_here\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert call_target("own_code_here:build", {"size": 3}, "data.target") == [3]
    with pytest.raises(RequestError, match=re.escape("build(size)")):
        call_target("own_code_here:build", {"sise": 3}, "data.target")
    with pytest.raises(RequestError, match="did you mean build"):
        import_target("own_code_here:biuld", "data.target")
    with pytest.raises(RequestError, match="imports no_such_package_here"):
        import_target("own_code_broken:build", "data.target")
