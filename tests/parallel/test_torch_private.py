"""What torch keeps private: as it is in this torch, and taken away as a later one may."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from surefoot.core.errors import RankError
from surefoot.parallel.lookout import Lookout
from surefoot.parallel.torch_private import (
    default_store,
    limit_collectives,
    num_collectives,
    process_groups,
)

LIMIT = timedelta(seconds=7)
INTERNALS: Any = dist.distributed_c10d


@pytest.fixture
def group(tmp_path: Path) -> Iterator[dist.ProcessGroup]:
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield INTERNALS._get_default_group()
    dist.destroy_process_group()


def test_this_torch_has_what_is_needed(group: dist.ProcessGroup) -> None:
    assert process_groups() == [group]
    before = num_collectives(group)
    dist.barrier()
    assert before is not None
    assert num_collectives(group) == before + 1
    assert limit_collectives(group, LIMIT)
    default_store().set("a", "b")
    assert default_store().get("a") == b"b"


def raising(error: Exception) -> Any:
    def call(*arguments: Any) -> Any:
        raise error

    return call


OTHERWISE = [TypeError("takes 3 arguments"), RuntimeError("no backend"), AttributeError("gone")]


@pytest.mark.parametrize("error", OTHERWISE, ids=lambda error: type(error).__name__)
def test_what_has_another_form_is_done_without(error: Exception, monkeypatch: Any) -> None:
    monkeypatch.setattr(INTERNALS, "_set_pg_timeout", raising(error))
    assert not limit_collectives(None, LIMIT)
    assert num_collectives(SimpleNamespace(_get_sequence_number_for_group=raising(error))) is None
    monkeypatch.setattr(INTERNALS, "_world", SimpleNamespace(pg_map=3))
    assert process_groups() == []


def test_what_is_gone_is_done_without(group: dist.ProcessGroup, monkeypatch: Any) -> None:
    for name in ("_world", "_set_pg_timeout", "_get_default_store"):
        with monkeypatch.context() as without:
            without.delattr(INTERNALS, name)
            assert process_groups() == ([] if name == "_world" else [group])
            assert limit_collectives(group, LIMIT) == (name != "_set_pg_timeout")
            if name == "_get_default_store":
                with pytest.raises(RankError, match="does not give away the store"):
                    default_store()
    assert num_collectives(SimpleNamespace()) is None


@pytest.mark.parametrize("name", ["_world", "_set_pg_timeout", "_get_sequence_number_for_group"])
def test_the_lookout_looks_on_without(
    name: str, group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    lookout = Lookout(default_store(), 0, 1, 1.0, lambda failure: None)
    try:
        assert list(lookout._calls()) == [group.group_name]
        owner = dist.ProcessGroup if name == "_get_sequence_number_for_group" else INTERNALS
        monkeypatch.delattr(owner, name)
        lookout.wait_at_most(2.0)
        lookout._look(0.1)
        assert list(lookout._calls()) == ([group.group_name] if name == "_set_pg_timeout" else [])
    finally:
        monkeypatch.undo()
        lookout.stop()
