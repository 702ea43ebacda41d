"""Ranks that are gone, silent or late are named, by the rank that finds out first; all leave."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from surefoot.core.errors import RankError
from surefoot.observe.files.lock import birth_of, this_place
from surefoot.parallel import lookout as module
from surefoot.parallel.lookout import (
    Lookout,
    LookoutHooks,
    RankHeartbeat,
    Silence,
    behind,
    sign_key,
)
from surefoot.parallel.lost import Failure, How, claim, first_failure

DEADLINE = 1.0


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHECK_EVERY_SECONDS", 0.05)
    monkeypatch.setattr(module, "MAX_LEAVE_SECONDS", 0.2)


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    """A process that stands for another rank."""
    with subprocess.Popen(["sleep", "60"]) as process:
        yield process
        process.kill()


class Training:
    """What a rank tells and does, where it trains."""

    def __init__(
        self, store: dist.Store, rank: int = 0, size: int = 2, keeper: int | None = None
    ) -> None:
        self.said: list[str] = []
        self.told: list[Failure] = []
        self.ended = threading.Event()
        self.is_asked = False
        told, end = self.told.append, self.ended.set
        self.lookout = Lookout(store, rank, size, DEADLINE, told, end, keeper)
        self.hooks = LookoutHooks(
            dump=lambda: self.said.append("stacks"),
            record=lambda error: self.said.append(error.what),
            doing=lambda: "an update",
            asked=lambda: self.is_asked,
        )

    def run(self, calls: dict[str, int] | None = None) -> None:
        """Trains until it is ended."""
        self.lookout._calls = lambda: dict(calls or {})  # type: ignore[method-assign]
        with self.lookout.attached(self.hooks):
            self.lookout.start()
            assert self.ended.wait(30)


def leave_sign(store: dist.Store, rank: int, **fields: Any) -> None:
    sign = replace(RankHeartbeat.here(), **fields)
    store.set(sign_key(rank), json.dumps(asdict(sign)))


def of(process: subprocess.Popen[bytes]) -> dict[str, Any]:
    return {"pid": process.pid, "born": birth_of(process.pid), "place": this_place()}


def test_a_process_that_has_died_on_this_machine_is_seen_at_once(
    sleeper: subprocess.Popen[bytes],
) -> None:
    store = dist.HashStore()
    leave_sign(store, 1, **of(sleeper))
    training = Training(store)
    sleeper.kill()
    sleeper.wait()
    began = time.monotonic()
    training.run()
    assert time.monotonic() - began < 20
    failure = first_failure(store)
    assert failure is not None and (failure.rank, failure.how, failure.by) == (1, How.GONE, 0)
    assert training.told == [failure] and training.said == ["stacks", "rank 1 is gone"]


def test_one_that_has_come_to_its_end_is_not_lost(sleeper: subprocess.Popen[bytes]) -> None:
    store = dist.HashStore()
    leave_sign(store, 1, **of(sleeper), left=True)
    training = Training(store)
    sleeper.kill()
    sleeper.wait()
    training.lookout.start()
    time.sleep(2 * DEADLINE)
    training.lookout.stop()
    assert first_failure(store) is None and not training.ended.is_set()
    assert RankHeartbeat(**json.loads(store.get(sign_key(0)))).left


def test_a_stopped_process_is_named_within_the_deadline(
    sleeper: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    store = dist.HashStore()
    leave_sign(store, 1, **of(sleeper), doing="a save")
    sleeper.send_signal(signal.SIGSTOP)
    training = Training(store)
    training.run()
    (failure,) = training.told
    error = failure.error()
    assert error.what == "rank 1 hangs: its process has been stopped for 1 s"
    assert "last: a save" in error.where and "parallel.deadline" in error.rule
    assert training.said == ["stacks", error.what]


def test_one_that_gives_signs_is_waited_for() -> None:
    store = dist.HashStore()
    first, second = Training(store, 0), Training(store, 1)
    for training in (first, second):
        training.lookout._calls = lambda: {}  # type: ignore[method-assign]
        training.lookout.start()
    time.sleep(2 * DEADLINE)
    first.lookout.stop()
    second.lookout.stop()
    assert first_failure(store) is None


def test_one_that_does_not_come_to_a_collective_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted: list[int] = []
    monkeypatch.setattr(module, "ask_for_stacks", lambda store, rank: wanted.append(rank))
    store = dist.HashStore()
    first, second = Training(store, 0), Training(store, 1)
    threads = [
        threading.Thread(target=first.run, args=({"0": 7, "1": 3},)),
        threading.Thread(target=second.run, args=({"0": 6, "1": 3},)),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (error,) = first.told
    assert error.rank == 1
    assert error.what == "rank 1 hangs: others have waited for it in a collective for 1 s"
    assert second.told == [] and second.said == ["stacks", error.what], "it leaves too"
    assert wanted == [1], "once, by one that is not meant"


def test_a_rank_that_trains_is_asked_for_its_stacks_and_goes_on(
    sleeper: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = dist.HashStore()
    sent: list[tuple[int, int]] = []
    with monkeypatch.context() as patch:
        patch.setattr(module.os, "kill", lambda pid, number: sent.append((pid, number)))
        module.ask_for_stacks(store, 1)
        leave_sign(store, 1, **of(sleeper))
        module.ask_for_stacks(store, 1)
        leave_sign(store, 1, **{**of(sleeper), "born": "another"}, listens=True)
        module.ask_for_stacks(store, 1)
        assert sent == []
        leave_sign(store, 1, **of(sleeper), listens=True)
        module.ask_for_stacks(store, 1)
    assert sent == [(sleeper.pid, signal.SIGUSR2), (sleeper.pid, signal.SIGCONT)]


def test_others_may_ask_for_stacks_as_soon_as_a_rank_trains() -> None:
    store = dist.HashStore()
    training = Training(store)
    assert not module.read_signs(store, [0])[0].listens
    with training.lookout.attached(training.hooks):
        assert module.read_signs(store, [0])[0].listens, "though nobody has looked yet"


def test_who_leaves_after_a_hang_waits_until_the_others_have_written_their_stacks() -> None:
    store = dist.HashStore()
    leave_sign(store, 1, listens=True)
    leave_sign(store, 2, listens=True)
    ranks = [Training(store, 0, 3), Training(store, 2, 3)]
    first, slow = ranks
    hangs = Failure(1, How.HANGS, 0, "rank 1 hangs")
    left = threading.Event()

    def leave() -> None:
        first.lookout.write_stacks_of_all(store, first.lookout.accuse(store, hangs))
        left.set()

    with first.lookout.attached(first.hooks), slow.lookout.attached(slow.hooks):
        thread = threading.Thread(target=leave)
        thread.start()
        assert not left.wait(0.3) and first.said == ["stacks"]
        slow.lookout._look(0.1)
        slow.lookout._leave(hangs)
        assert left.wait(10) and slow.said[0] == "stacks"
        thread.join()


def test_nobody_is_waited_for_that_does_not_train_or_hangs() -> None:
    store = dist.HashStore()
    leave_sign(store, 0, listens=True, stacks=True)
    leave_sign(store, 1, listens=True)
    leave_sign(store, 2)
    assert module.all_have_written(store, range(4), hanging=1)
    leave_sign(store, 3, listens=True)
    assert not module.all_have_written(store, range(4), hanging=1)
    leave_sign(store, 3, listens=True, left=True)
    assert module.all_have_written(store, range(4), hanging=1)


def test_a_rank_that_keeps_the_store_and_stops_is_named_without_it() -> None:
    store = dist.HashStore()
    training = Training(store, rank=1, keeper=0)
    answers = threading.Event()
    read = module.first_failure

    def first_failure_of(store: dist.Store) -> Failure | None:
        assert answers.wait(30)
        return read(store)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "first_failure", first_failure_of)
        training.run()
        answers.set()
        training.lookout.stop()
    assert training.said[0] == "stacks"
    assert training.said[1] == "rank 0 hangs: its store has not answered for 1 s"


def test_all_that_wait_for_nobody_and_are_late() -> None:
    assert behind({0: {"a": 4}, 1: {"a": 4}}) == []
    assert behind({0: {"a": 4}, 1: {"b": 3}}) == [], "no group in common"
    assert behind({r: {"a": 5 - (r in (1, 2))} for r in range(4)}) == [1, 2]


def test_what_passes_while_nobody_looks_is_held_against_nobody() -> None:
    silence = Silence()
    sign = RankHeartbeat.here()
    assert silence.longest({1: sign, 2: sign}, 5.0) == (1, 0.0)
    assert silence.longest({1: replace(sign, count=1), 2: sign}, 0.5) == (2, 0.5)
    assert silence.longest({1: replace(sign, count=1), 2: sign}, 0.5) == (2, 1.0)
    assert silence.longest({}, 0.5) == (0, 0.0)


def test_the_first_word_counts_and_a_rank_that_fails_tells_itself() -> None:
    store = dist.HashStore()
    own = Failure(0, How.FAILED, 0)
    assert claim(store, own) == own
    assert claim(store, Failure(1, How.GONE, 0)) == own
    failing, other = Training(store, 0), Training(store, 1)
    failing.lookout.start()
    other.run()
    assert other.said == ["rank 0 has failed"], "stacks tell nothing here"
    failing.lookout._thread.join(10)
    assert not failing.ended.is_set() and failing.told == []


def test_a_main_thread_that_leaves_by_itself_is_left_alone() -> None:
    store = dist.HashStore()
    training = Training(store)
    training.lookout.start()
    with suppress(RankError), training.lookout.attached(training.hooks):
        claim(store, Failure(1, How.HANGS, 1, "rank 1 hangs"))
        raise RankError("rank 1 hangs")
    training.lookout._thread.join(10)
    assert not training.ended.is_set()
    training.lookout.stop()


def test_what_one_rank_is_asked_the_others_hear() -> None:
    store = dist.HashStore()
    first, second = Training(store, 0), Training(store, 1)
    with first.lookout.attached(first.hooks), second.lookout.attached(second.hooks):
        for training in (first, second):
            training.lookout._calls = lambda: {}  # type: ignore[method-assign]
            training.lookout.start()
        first.is_asked = True
        until = time.monotonic() + 20
        while not second.lookout.any_asked:
            assert time.monotonic() < until
            time.sleep(0.01)
    with second.lookout.attached(second.hooks):
        assert not second.lookout.any_asked, "that was another training"
    first.lookout.stop()
    second.lookout.stop()
    assert os.getpid() == RankHeartbeat.here().pid
