"""Each rank sends heartbeats and checks those of the others; a rank that is gone or hangs is named.

A thread of each rank writes heartbeats to the shared store. The death of a process on the same
machine is detected at once; a process without heartbeats, or one that does not reach a collective
in which others wait, within the deadline. Then every rank writes its stacks to a file and exits,
even if its main thread waits in foreign code. No tensors are sent here; a healthy run is not
affected.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from typing import Any

import psutil
import torch.distributed as dist

from surefoot.core.errors import EXIT_FAILED, RankError
from surefoot.observe.files.lock import birth_of, this_place
from surefoot.observe.watch import ASK_SIGNAL
from surefoot.parallel.lost import Failure, How, claim, first_failure, named
from surefoot.parallel.torch_private import limit_collectives, num_collectives, process_groups

CHECK_EVERY_SECONDS = 0.5
CHECKS_PER_DEADLINE = 8
MAX_LEAVE_SECONDS = 2.0
"""How long the main thread of a rank that learns of a failure may take to exit by itself."""
MAX_STACKS_WAIT_SECONDS = 1.5
"""How long a rank that exits after a hang, or wakes a stopped process, waits for the other ranks to
write their stacks: the stack of what they wait for would end with it."""
STACKS_POLL_SECONDS = 0.05
COLLECTIVE_TIMEOUT_DEADLINES = 2
"""Collectives time out after this many deadlines, in case no check has run."""


@dataclass(frozen=True)
class RankHeartbeat:
    """Heartbeat of a rank: what it reports about itself."""

    pid: int
    born: str
    place: str
    """Namespace of process ids: equal text, equal meaning of a pid."""
    host: str
    count: int = 0
    doing: str = ""
    listens: bool = False
    """Whether `ASK_SIGNAL` makes it write its stacks."""
    stacks: bool = False
    """Whether it has written its stacks, after a failure."""
    left: bool = False
    """Whether it has ended regularly."""
    calls: Mapping[str, int] = field(default_factory=dict)
    """Number of collectives it has called, per group."""

    @classmethod
    def here(cls) -> RankHeartbeat:
        """Of this process."""
        return cls.near(os.getpid())

    @classmethod
    def near(cls, pid: int) -> RankHeartbeat:
        """Of a process on this machine, which may not have sent a heartbeat itself."""
        return cls(pid, birth_of(pid), this_place(), os.uname().nodename)

    @property
    def is_stopped(self) -> bool:
        """Whether its process, on this machine, is stopped by a signal."""
        with suppress(psutil.Error):
            return bool(psutil.Process(self.pid).status() == psutil.STATUS_STOPPED)
        return False

    def __str__(self) -> str:
        doing = f", last: {self.doing}" if self.doing else ""
        return f"process {self.pid} on {self.host}{doing}"


@dataclass(frozen=True)
class LookoutHooks:
    """What a training provides to the lookout."""

    dump: Callable[[], None]
    """Writes the stacks of this process to a file."""
    record: Callable[[RankError], None]
    """Records the error that ended the run, if the main thread cannot."""
    doing: Callable[[], str]
    asked: Callable[[], bool]
    """Whether this rank has been asked to stop."""


def sign_key(rank: int) -> str:
    """Store key of a rank's heartbeat."""
    return f"sign/{rank}"


def read_signs(store: dist.Store, ranks: Sequence[int]) -> dict[int, RankHeartbeat]:
    """The heartbeats of the ranks that have sent one."""
    there = [rank for rank in ranks if store.check([sign_key(rank)])]
    texts = store.multi_get([sign_key(rank) for rank in there]) if there else []
    return {
        rank: RankHeartbeat(**json.loads(text)) for rank, text in zip(there, texts, strict=True)
    }


def all_have_written(store: dist.Store, ranks: Sequence[int], hanging: int) -> bool:
    """Whether all training ranks, except the hanging one, have written their stacks."""
    signs = read_signs(store, ranks)
    return all(s.stacks or s.left or not s.listens for r, s in signs.items() if r != hanging)


class Silence:
    """Seconds without a heartbeat, per rank; time in which no check ran is not counted."""

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}
        self._seconds: dict[int, float] = {}

    def longest(self, signs: Mapping[int, RankHeartbeat], seconds: float) -> tuple[int, float]:
        """Rank and seconds of the longest silence, after `seconds` more have passed."""
        for rank, sign in signs.items():
            silent = sign.count == self._counts.get(rank)
            self._seconds[rank] = self._seconds.get(rank, 0.0) + seconds if silent else 0.0
            self._counts[rank] = sign.count
        return max(((r, self._seconds[r]) for r in signs), key=lambda s: s[1], default=(0, 0.0))


def silent_failure(
    rank: int, sign: RankHeartbeat, seconds: float, by: int, is_near: bool
) -> Failure:
    """The failure reported for a rank without heartbeats."""
    why = f"no heartbeat for {seconds:.0f} s"
    if is_near and sign.is_stopped:
        why = f"its process has been stopped for {seconds:.0f} s"
    return Failure(rank, How.HANGS, by, f"rank {rank} hangs: {why}", str(sign))


def behind(calls: Mapping[int, Mapping[str, int]]) -> list[int]:
    """Ranks that others wait for and that wait for no rank themselves.

    A rank waits if it has called a collective that another rank of the group has not.

    >>> behind({0: {"a": 5}, 1: {"a": 4}})
    [1]
    >>> behind({0: {"a": 5}, 1: {"a": 4, "b": 3}, 2: {"b": 2}})
    [2]
    """
    waiting: set[int] = set()
    late: set[int] = set()
    for group in {name for own in calls.values() for name in own}:
        counts = {rank: own[group] for rank, own in calls.items() if group in own}
        most = max(counts.values())
        waiting |= {rank for rank, count in counts.items() if count > min(counts.values())}
        late |= {rank for rank, count in counts.items() if count < most}
    return sorted(late - waiting)


class Lookout:
    """The thread that sends and checks heartbeats, for one rank.

    Args:
        store: shared by all; used by no other thread.
        rank: of this process.
        size: number of ranks.
        deadline_seconds: longest wait for another rank.
        tell: called with a lost rank's failure, on the one rank that detected it first.
        end: ends this process immediately.
        keeper: the rank whose process hosts the store, if any: if it stops, the store does.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        size: int,
        deadline_seconds: float,
        tell: Callable[[Failure], None] = lambda failure: None,
        end: Callable[[], None] | None = None,
        keeper: int | None = None,
    ) -> None:
        self.rank = rank
        self.failure: Failure | None = None
        self._store = store
        self._size = size
        self._deadline = deadline_seconds
        self._tell, self._end = tell, end or _end_process
        self._keeper = keeper
        self._hooks: LookoutHooks | None = None
        self._attachments = 0
        self.any_asked = False
        """Whether any rank of the training has been asked to stop, as of the last check."""
        self._sign, self._showing = RankHeartbeat.here(), threading.Lock()
        self._near: dict[int, RankHeartbeat] | None = None
        """The other ranks on this machine, once each has sent a heartbeat."""
        self._silence = Silence()
        self._stalled = 0.0
        self._timed: set[str] = set()
        self._writing, self._has_written = threading.Lock(), False
        self._away = threading.Event()
        """Set when the main thread no longer trains."""
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, name="surefoot-lookout", daemon=True)
        self._show()

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()
        if self._keeper not in (None, self.rank):
            threading.Thread(target=self._watch_store, name="surefoot-store", daemon=True).start()

    def accuse(self, store: dist.Store, failure: Failure) -> Failure:
        """Claims and reports a rank that hangs, from the thread that has waited for it.

        Args:
            store: that of the calling thread.

        Returns:
            The failure that counts: another rank may have reported one before.
        """
        self.write_stacks(failure)
        counts = claim(store, failure)
        if counts == failure:
            self._tell(failure)
        return counts

    def write_stacks_of_all(self, store: dist.Store, failure: Failure) -> None:
        """As `write_stacks`, then waits for the other ranks to write theirs; for a rank that exits.

        Args:
            store: that of the calling thread.
        """
        self.write_stacks(failure)
        until = time.monotonic() + MAX_STACKS_WAIT_SECONDS
        others = [rank for rank in range(self._size) if rank != self.rank]
        while failure.how is How.HANGS and not all_have_written(store, others, failure.rank):
            if time.monotonic() > until:
                return
            time.sleep(STACKS_POLL_SECONDS)

    def write_stacks(self, failure: Failure) -> None:
        """Writes the stacks of this rank once, unless a rank reported its own error."""
        with self._writing:
            hooks = self._hooks
            if hooks is None or failure.how is How.FAILED or self._has_written:
                return
            hooks.dump()
            self._has_written = True

    def stop(self) -> None:
        """Stops the lookout when the process ends regularly; idempotent."""
        if self._done.is_set():
            return
        self._away.set()
        self._done.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(MAX_LEAVE_SECONDS)
        if not self._thread.is_alive():
            with suppress(dist.DistError, RuntimeError):
                self._show(left=True)

    def wait_at_most(self, seconds: float) -> None:
        """Sets the deadline, also for torch's collectives."""
        self._deadline = seconds
        self._timed.clear()

    @contextmanager
    def attached(self, hooks: LookoutHooks) -> Iterator[None]:
        """Registers a training, which a failure ends together with its process."""
        self._away.clear()
        self._attachments += 1
        self.any_asked = False
        self._hooks = hooks
        # Immediately: a rank may hang from its first step on.
        with suppress(dist.DistError, RuntimeError):
            self._show()
        try:
            yield
        finally:
            self._hooks = None
            self._away.set()

    # -- the thread ----------------------------------------------------------------------------

    def _run(self) -> None:
        last = time.monotonic()
        # If the store is gone, so is the launcher or rank 0, which others detect.
        with suppress(dist.DistError, RuntimeError):
            while not self._done.wait(self._pause()):
                now = time.monotonic()
                # Time in which this process was suspended or stopped is not counted.
                self._look(min(now - last, 2 * CHECK_EVERY_SECONDS))
                last = now
                failure = self.failure
                if failure is not None:
                    if failure.how is not How.FAILED or failure.rank != self.rank:
                        self._leave(failure)
                    return

    def _pause(self) -> float:
        return min(CHECK_EVERY_SECONDS, self._deadline / CHECKS_PER_DEADLINE)

    def _look(self, seconds: float) -> None:
        calls = self._calls()
        self._stalled = self._stalled + seconds if calls == self._sign.calls else 0.0
        doing = self._hooks.doing() if self._hooks is not None else ""
        self._show(calls=calls, doing=doing)
        self._pass_on_what_is_asked()
        self.failure = first_failure(self._store)
        for found in self._look_around(seconds):
            if self.failure is None:
                self.failure = self.accuse(self._store, found)

    def _pass_on_what_is_asked(self) -> None:
        hooks, key = self._hooks, f"asked/{self._attachments}"
        if hooks is None or self.any_asked:
            return
        if hooks.asked():
            self._store.set(key, "")
        self.any_asked = self._store.check([key])

    def _look_around(self, seconds: float) -> Iterator[Failure]:
        near = self._near_ranks()
        for rank, sign in list(near.items()):
            if birth_of(sign.pid) != sign.born:
                del near[rank]
                last = read_signs(self._store, [rank])[rank]
                if not last.left:
                    yield Failure(rank, How.GONE, self.rank, where=str(last))
        # Each rank checks the next one: together they cover all.
        next_rank = (self.rank + 1) % self._size
        signs = {r: s for r, s in read_signs(self._store, [next_rank]).items() if not s.left}
        rank, silent = self._silence.longest(signs, seconds)
        if silent > self._deadline:
            yield silent_failure(rank, signs[rank], silent, self.rank, rank in near)
        if self._stalled > self._deadline and self._hooks is not None:
            yield from self._look_who_is_late()

    def _near_ranks(self) -> dict[int, RankHeartbeat]:
        if self._near is not None:
            return self._near
        signs = read_signs(self._store, range(self._size))
        place = self._sign.place
        near = {r: sign for r, sign in signs.items() if sign.place == place and r != self.rank}
        if len(signs) == self._size:
            self._near = near
        return near

    def _look_who_is_late(self) -> Iterator[Failure]:
        signs = read_signs(self._store, range(self._size))
        late = behind({rank: sign.calls for rank, sign in signs.items()})
        if late and self.rank not in late:
            what = (
                f"{named(late)} hang{'s' if len(late) == 1 else ''}: others have waited for it in "
                f"a collective for {self._stalled:.0f} s"
            )
            yield Failure(late[0], How.HANGS, self.rank, what, str(signs[late[0]]))

    def _calls(self) -> dict[str, int]:
        calls: dict[str, int] = {}
        for group in process_groups():
            name = getattr(group, "group_name", None)
            if name is None:
                continue
            if (count := num_collectives(group)) is not None:
                calls[name] = count
            if name not in self._timed:
                self._timed.add(name)
                limit_collectives(
                    group, timedelta(seconds=COLLECTIVE_TIMEOUT_DEADLINES * self._deadline)
                )
        return calls

    def _show(self, **news: Any) -> None:
        with self._showing:
            listens, count = self._hooks is not None, self._sign.count + 1
            news = {"listens": listens, "stacks": self._has_written, "count": count, **news}
            self._sign = replace(self._sign, **news)
            self._store.set(sign_key(self.rank), json.dumps(asdict(self._sign)))

    def _watch_store(self) -> None:
        """Ends this process if the store does not answer: no failure can be reported through it."""
        assert self._keeper is not None
        silence, last = Silence(), time.monotonic()
        silent = 0.0
        while silent <= self._deadline:
            if self._done.wait(self._pause()) or not self._thread.is_alive():
                return
            now = time.monotonic()
            passed = min(now - last, 2 * CHECK_EVERY_SECONDS)
            # This rank sends a heartbeat each time the store has answered all its requests.
            _, silent = silence.longest({self._keeper: self._sign}, passed)
            last = now
        what = f"rank {self._keeper} hangs: its store has not answered for {silent:.0f} s"
        failure = Failure(self._keeper, How.HANGS, self.rank, what, f"seen by rank {self.rank}")
        self._tell(failure)
        self.write_stacks(failure)
        self._record_and_end(failure, self._hooks)

    def _record_and_end(self, failure: Failure, hooks: LookoutHooks | None) -> None:
        if hooks is not None:
            hooks.record(failure.error(f"seen by rank {self.rank}"))
        self._end()

    def _leave(self, failure: Failure) -> None:
        hooks = self._hooks
        self.write_stacks(failure)
        self._show()
        # A main thread that can exit by itself does: it sees the same failure.
        left = self._away.wait(MAX_LEAVE_SECONDS)
        near = self._near_ranks()
        asks = min((rank for rank in (*near, self.rank) if rank != failure.rank), default=-1)
        if failure.how is How.HANGS and failure.rank in near and asks == self.rank:
            # Last, since it wakes a stopped process.
            self.write_stacks_of_all(self._store, failure)
            ask_for_stacks(self._store, failure.rank)
        if not left:
            self._record_and_end(failure, hooks)


def ask_for_stacks(store: dist.Store, rank: int) -> None:
    """Makes a training rank on this machine write its stacks, even if it is stopped."""
    sign = read_signs(store, [rank]).get(rank)
    if sign is None or not sign.listens or birth_of(sign.pid) != sign.born:
        return
    with suppress(OSError):
        os.kill(sign.pid, ASK_SIGNAL)
        os.kill(sign.pid, signal.SIGCONT)


def _end_process() -> None:
    # The main thread may wait forever: no clean-up is run.
    for child in multiprocessing.active_children():
        child.kill()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(EXIT_FAILED)


_current: Lookout | None = None


def current() -> Lookout | None:
    """The lookout of this process, if a launcher has started it as one of several ranks."""
    return _current


def begin(lookout: Lookout) -> None:
    """Makes it the lookout of this process, and starts it."""
    global _current
    _current = lookout
    lookout.start()


def end() -> None:
    """Stops the lookout of this process."""
    global _current
    if _current is not None:
        _current.stop()
        _current = None


def asked_elsewhere() -> bool:
    """Whether any rank has been asked to stop, as far as this one knows."""
    return _current is not None and _current.any_asked


@contextmanager
def attached(hooks: LookoutHooks) -> Iterator[None]:
    """Registers a training in this process; does nothing for a single rank."""
    if _current is None:
        yield
        return
    with _current.attached(hooks):
        yield
