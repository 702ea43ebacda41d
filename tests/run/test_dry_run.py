"""A dry run is one update of everything that a run would be made of."""

from __future__ import annotations

from pathlib import Path

import torch

from run.test_session import Told, request
from surefoot.run.dry_run import try_once


def test_the_update_is_that_of_a_run_and_nothing_is_left(tmp_path: Path) -> None:
    told = Told()
    result = try_once(request(tmp_path / "run", told, optimizer={"kind": "sgd", "lr": 0.1}))
    torch.manual_seed(0)
    fresh = torch.nn.Linear(3, 1)
    assert not torch.equal(result.model.weight, fresh.weight), "an update was made"
    assert result.reason == "built, ran one update" and not list(tmp_path.iterdir())
