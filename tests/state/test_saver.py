"""A save beside the training: it sees one moment, one is in flight, its errors come out in time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import HashStore

from surefoot.core.errors import CheckpointError, DiskRefusedError
from surefoot.parallel.ranks import OneRank, Ranks, StoreRanks
from surefoot.state import commit as module
from surefoot.state import saver as saver_module
from surefoot.state.checkpoint import list_checkpoints, newest_whole, read_checkpoint
from surefoot.state.commit import Draft, commit, put_back
from surefoot.state.retention import Keep, Retention
from surefoot.state.saver import SaveKind, SavePolicy, Saver
from surefoot.state.shards import pieces_of


def draft(step: int, tensor: Tensor | None = None, **fields: Any) -> Draft:
    tensor = torch.full((8,), float(step)) if tensor is None else tensor
    return Draft(step, pieces_of({"model/w": tensor}), {"step": step}, {}, **fields)


class Told:
    def __init__(self) -> None:
        self.events: list[tuple[str, str, Mapping[str, object]]] = []

    def __call__(self, kind: str, message: str, data: Mapping[str, object]) -> None:
        assert threading.current_thread() is threading.main_thread() or self.anywhere
        self.events.append((kind, message, data))

    anywhere = False

    @property
    def kinds(self) -> list[str]:
        return [kind for kind, _, _ in self.events]


def saver(
    folder: Path, told: Told, mode: str = "async", on_full: str = "stop", ranks: Ranks | None = None
) -> Saver:
    policy = SavePolicy(mode, on_full)  # type: ignore[arg-type]
    return Saver(folder, policy, Retention(folder, Keep(2, 0)), ranks or OneRank(), told)


class Gate:
    """Holds the commit until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open, self.running, self.most = threading.Event(), 0, 0

        def held(*args: Any) -> Path:
            self.running += 1
            self.most = max(self.most, self.running)
            assert self.open.wait(30)
            self.running -= 1
            return commit(*args)

        monkeypatch.setattr(saver_module, "commit", held)


def test_the_training_goes_on_and_the_moment_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, told = Gate(monkeypatch), Told()
    made, live = saver(tmp_path, told), torch.full((8,), 1.0)
    made.save(draft(1, live))
    live.fill_(2.0)
    made.poll()
    assert told.events == [], "it is still under way"
    gate.open.set()
    assert made.finish()
    assert (newest_whole(tmp_path)[2].tensors["model/w"] == 1.0).all()
    assert told.kinds == ["save"]
    seconds = told.events[0][2]
    assert 0 <= seconds["stalled_seconds"] <= seconds["seconds"]  # type: ignore[operator]


def test_one_is_in_flight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, told = Gate(monkeypatch), Told()
    made = saver(tmp_path, told)
    made.save(draft(1))
    threading.Timer(0.05, gate.open.set).start()
    for step in (2, 3, 4):
        made.save(draft(step))
    made.finish()
    assert gate.most == 1
    assert told.kinds == ["save"] * 4
    assert [path.name[-1] for path in list_checkpoints(tmp_path)] == ["3", "4"]


@pytest.mark.parametrize("boundary", ["poll", "save", "finish"])
def test_an_error_reaches_the_next_boundary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, boundary: str
) -> None:
    made = saver(tmp_path, Told())
    made.save(draft(1))
    made.finish()
    with monkeypatch.context() as patch:
        patch.setattr(module, "write_tensors", fails(5))
        made.save(draft(2))
        assert made._flight is not None and made._flight.thread is not None
        made._flight.thread.join()
        with pytest.raises(DiskRefusedError, match="Input/output error"):
            {"poll": made.poll, "finish": made.finish, "save": lambda: made.save(draft(3))}[
                boundary
            ]()
    assert newest_whole(tmp_path)[1].step == 1
    # It was told once; the next save works.
    assert made.save(draft(4)) and made.finish()


@pytest.mark.parametrize("number", [5, 28, 30, 116], ids=["EIO", "ENOSPC", "EROFS", "ESTALE"])
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_disk_that_refuses_pauses_saving(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, mode: str
) -> None:
    told = Told()
    made = saver(tmp_path, told, mode, "continue")
    assert made.save(draft(1)) and made.finish()
    with monkeypatch.context() as patch:
        patch.setattr(module, "write_text", fails(number))
        made.save(draft(2))
        assert not made.finish() or mode == "sync"
    assert made.save(draft(3)) and made.finish()
    assert told.kinds == ["save", "save-paused", "save"]
    _, message, data = told.events[1]
    assert "NO CHECKPOINT at step 2" in message and str(tmp_path) in message
    assert data["checkpoint_step"] == 2 and data["folder"] == str(tmp_path)
    assert data["needed_bytes"] == 8 * 4 + module.SPARE_BYTES
    assert isinstance(data["free_bytes"], int)
    assert [path.name[-1] for path in list_checkpoints(tmp_path)] == ["1", "3"]
    assert not list(tmp_path.glob("*.tmp"))
    monkeypatch.setattr(module, "write_text", fails(number))
    with pytest.raises(DiskRefusedError):
        made.save(draft(4), SaveKind.FINAL)


def test_what_was_free_when_the_disk_refused_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = 0

    class FreedMeanwhile(OneRank):
        """Another program makes room while the ranks hear of it."""

        def channel(self, name: str) -> FreedMeanwhile:
            return self

        def gather(self, what: str, value: Any) -> list[Any]:
            nonlocal free
            free = 1 << 40
            return [value]

    told = Told()
    made = saver(tmp_path, told, "sync", "continue", FreedMeanwhile())
    monkeypatch.setattr(module, "free_bytes", lambda folder: free)

    def full(*args: Any) -> None:
        nonlocal free
        free = 4
        fails(28)()

    monkeypatch.setattr(module, "write_text", full)
    made.save(draft(1))
    trouble = CheckpointError("the log stands on a full disk")
    trouble.__cause__ = OSError(28, "No space left on device")
    made.save(draft(2, trouble=trouble, free_bytes=3))
    assert [data["free_bytes"] for _, _, data in told.events] == [4, 3]


@pytest.mark.parametrize("number", [2, 13, 20], ids=["ENOENT", "EACCES", "ENOTDIR"])
def test_what_no_waiting_mends_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    made = saver(tmp_path, Told(), "sync", "continue")
    monkeypatch.setattr(module, "write_text", fails(number))
    with pytest.raises(CheckpointError) as caught:
        made.save(draft(1))
    assert not isinstance(caught.value, DiskRefusedError)


def test_a_run_folder_that_is_gone_is_not_made_again(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    made = saver(run / "checkpoints", Told(), "sync")
    assert made.save(draft(1)), "the folder of the checkpoints alone is made again"
    run.rename(tmp_path / "moved")
    with pytest.raises(CheckpointError, match="No such file"):
        made.save(draft(2))
    assert not run.exists()


def fails(number: int) -> Callable[..., None]:
    def call(*args: object, **kwargs: object) -> None:
        raise OSError(number, {5: "Input/output error", 28: "No space left"}.get(number, "refused"))

    return call


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_an_orphan_publishes_nothing(tmp_path: Path, mode: str) -> None:
    commit(tmp_path, draft(1))
    made = saver(tmp_path, Told(), mode, "continue")
    with pytest.raises(CheckpointError, match="no longer owns the run folder"):
        made.save(draft(2, still_owner=lambda: False))
        made.finish()
    assert {path.name for path in tmp_path.iterdir()} == {"step-00000001", "latest"}
    assert (tmp_path / "latest").read_text() == "step-00000001\n"


def test_the_fence_is_asked_after_all_is_written(tmp_path: Path) -> None:
    seen: list[list[str]] = []

    def still_owner() -> bool:
        (beside,) = tmp_path.glob("*.tmp")
        seen.append(sorted(path.name for path in beside.iterdir()))
        return True

    commit(tmp_path, draft(1, still_owner=still_owner))
    assert seen == [["manifest.json", "model.safetensors", "state.json"]]


def test_a_replacement_that_was_cut_short_is_put_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit(tmp_path, draft(1))
    real, calls = module.rename, 0

    def killed_at_second(old: Path, new: Path) -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise KeyboardInterrupt
        real(old, new)

    with monkeypatch.context() as patch:
        patch.setattr(module, "rename", killed_at_second)
        with pytest.raises(KeyboardInterrupt):
            commit(tmp_path, draft(1))
    assert list_checkpoints(tmp_path) == []
    put_back(tmp_path)
    assert newest_whole(tmp_path)[1].step == 1 and not list(tmp_path.glob("*.tmp"))
    # A replacement that was not cut short leaves nothing to put back.
    commit(tmp_path, draft(1, torch.zeros(8)))
    put_back(tmp_path)
    assert (read_checkpoint(tmp_path / "step-00000001")[1].tensors["model/w"] == 0).all()


def test_the_trouble_of_one_rank_is_the_trouble_of_all(tmp_path: Path) -> None:
    def life(rank: int, ranks: Ranks) -> tuple[str, list[str]]:
        told = Told()
        told.anywhere = True
        made = saver(tmp_path, told, "async", "continue", ranks)
        trouble = CheckpointError("the log cannot be written")
        trouble.__cause__ = OSError(28, "No space left on device")
        made.save(draft(1, trouble=trouble if rank == 1 else None))
        made.finish()
        made.save(draft(2))
        made.finish()
        return str(made.finish()), told.kinds

    assert on_two(life) == [("True", ["save-paused", "save"])] * 2
    assert newest_whole(tmp_path)[1].step == 2


def test_no_rank_hears_of_a_save_before_all_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = threading.Event()
    real = module._Commit.run

    def run(self: Any) -> Path:
        path = real(self)
        if self.ranks.rank == 1:
            assert slow.wait(30)
        return path

    monkeypatch.setattr(module._Commit, "run", run)

    def life(rank: int, ranks: Ranks) -> list[str]:
        told = Told()
        told.anywhere = True
        made = saver(tmp_path, told, "async", "continue", ranks)
        made.save(draft(1))
        assert made._flight is not None and made._flight.thread is not None
        made.poll()
        before = told.kinds
        slow.set()
        made._flight.thread.join(30)
        made.poll()
        return [*before, *told.kinds]

    assert on_two(life) == [["save"]] * 2


def test_a_refusal_to_delete_is_raised_on_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: Retention) -> list[Path]:
        raise CheckpointError("an old checkpoint could not be deleted")

    monkeypatch.setattr(Retention, "apply", refuse)

    def life(rank: int, ranks: Ranks) -> str:
        told = Told()
        told.anywhere = True
        with pytest.raises(CheckpointError, match="could not be deleted") as caught:
            saver(tmp_path, told, "sync", "continue", ranks).save(draft(1))
        return caught.value.what

    assert len(set(on_two(life))) == 1


@pytest.mark.parametrize(
    ("answer", "what"),
    [({"error": "state.json is missing"}, "is missing"), ({"attempt": "x"}, "different")],
    ids=["damaged there", "another one there"],
)
def test_what_another_rank_sees_makes_all_fall_back(
    tmp_path: Path, answer: dict[str, Any], what: str
) -> None:
    for step in (1, 2):
        commit(tmp_path, draft(step))

    class TwoRanks:
        """This rank, and another that answers otherwise where the newest is verified."""

        rank, size = 0, 2

        def gather(self, place: str, value: Any) -> list[Any]:
            return [value, answer if "00000002" in place else value]

        def channel(self, name: str) -> TwoRanks:
            return self

    path, manifest, _, refused = newest_whole(tmp_path, TwoRanks())
    assert manifest.step == 1 and path.name == "step-00000001"
    assert len(refused) == 1 and what in str(refused[0])


def on_two(life: Callable[[int, Ranks], Any]) -> list[Any]:
    """Two ranks as threads of this process."""
    store, answers = HashStore(), {}

    def play(rank: int) -> None:
        try:
            answers[rank] = life(rank, StoreRanks(store, rank, 2, deadline_seconds=30.0))
        except BaseException as error:
            answers[rank] = error

    threads = [threading.Thread(target=play, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for answer in answers.values():
        if isinstance(answer, BaseException):
            raise answer
    return [answers[0], answers[1]]
