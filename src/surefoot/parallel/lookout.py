"""Each rank shows that it lives, and looks whether the others do. Who is gone or hangs is named.

A thread of each rank leaves a sign of life in the store that all share. The death of a process on
the same machine is seen at once; a process that gives no more signs, and one that does not come to
a collective in which others wait, within the deadline. Then every rank writes down its stacks and
leaves, also one whose main thread waits in foreign code. No tensor travels here, and a run that
goes well is never touched.
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

LOOK_SECONDS = 0.5
LOOKS_PER_DEADLINE = 8
LEAVE_SECONDS = 2.0
"""The main thread of a rank that hears of a loss may leave by itself for so long."""
STACKS_SECONDS = 1.5
"""Whoever leaves after a hang, or wakes up what hangs, waits for so long until all have heard of it
and written down their stacks: what they wait for would end with it."""
STACKS_POLL_SECONDS = 0.05
BACKSTOP = 2
"""Collectives give up by themselves after so many deadlines, should nobody have looked."""


@dataclass(frozen=True)
class Sign:
    """What a rank says of itself."""

    pid: int
    born: str
    place: str
    """The same text, the same meaning of a process id."""
    host: str
    count: int = 0
    doing: str = ""
    listens: bool = False
    """Whether `ASK_SIGNAL` makes it write down its stacks."""
    stacks: bool = False
    """It has written them down, after a loss."""
    left: bool = False
    """It has come to its end."""
    calls: Mapping[str, int] = field(default_factory=dict)
    """Collectives that it has called, for each group."""

    @classmethod
    def here(cls) -> Sign:
        """Of this process."""
        return cls.near(os.getpid())

    @classmethod
    def near(cls, pid: int) -> Sign:
        """Of a process on this machine, which may have left none itself."""
        return cls(pid, birth_of(pid), this_place(), os.uname().nodename)

    @property
    def is_stopped(self) -> bool:
        """Whether its process, on this machine, has been stopped by a signal."""
        with suppress(psutil.Error):
            return bool(psutil.Process(self.pid).status() == psutil.STATUS_STOPPED)
        return False

    def __str__(self) -> str:
        doing = f", last: {self.doing}" if self.doing else ""
        return f"process {self.pid} on {self.host}{doing}"


@dataclass(frozen=True)
class LookoutHooks:
    """What a training lends to the lookout."""

    dump: Callable[[], None]
    """Writes down the stacks of this process."""
    record: Callable[[RankError], None]
    """Writes down what ended the run, where the main thread cannot."""
    doing: Callable[[], str]
    asked: Callable[[], bool]
    """Whether this rank has been asked to stop."""


def sign_key(rank: int) -> str:
    """Where a rank leaves its sign of life."""
    return f"sign/{rank}"


def read_signs(store: dist.Store, ranks: Sequence[int]) -> dict[int, Sign]:
    """The signs of life of those that have left one."""
    there = [rank for rank in ranks if store.check([sign_key(rank)])]
    texts = store.multi_get([sign_key(rank) for rank in there]) if there else []
    return {rank: Sign(**json.loads(text)) for rank, text in zip(there, texts, strict=True)}


def all_have_written(store: dist.Store, ranks: Sequence[int], hanging: int) -> bool:
    """Whether the stacks of all are written, that train and do not hang."""
    signs = read_signs(store, ranks)
    return all(s.stacks or s.left or not s.listens for r, s in signs.items() if r != hanging)


class Silence:
    """How long each of some ranks has given no sign; a time in which nobody looked counts not."""

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}
        self._seconds: dict[int, float] = {}

    def longest(self, signs: Mapping[int, Sign], seconds: float) -> tuple[int, float]:
        """Rank and seconds of the longest silence, with `seconds` more having passed."""
        for rank, sign in signs.items():
            silent = sign.count == self._counts.get(rank)
            self._seconds[rank] = self._seconds.get(rank, 0.0) + seconds if silent else 0.0
            self._counts[rank] = sign.count
        return max(((r, self._seconds[r]) for r in signs), key=lambda s: s[1], default=(0, 0.0))


def silent_failure(rank: int, sign: Sign, seconds: float, by: int, is_near: bool) -> Failure:
    """What is said of a rank that gives no signs."""
    why = f"it has shown no sign of life for {seconds:.0f} s"
    if is_near and sign.is_stopped:
        why = f"its process is stopped, since {seconds:.0f} s"
    return Failure(rank, How.HANGS, by, f"rank {rank} hangs: {why}", str(sign))


def behind(calls: Mapping[int, Mapping[str, int]]) -> list[int]:
    """Ranks that others wait for, and that wait for nobody themselves.

    A rank waits where it has called a collective that another of its group has not.

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
    """The thread that shows and looks, for one rank.

    Args:
        store: shared by all; no other thread waits for an answer of it.
        rank: of this process.
        size: how many ranks there are.
        deadline_seconds: longest wait for another rank.
        tell: is told of a rank that is lost, on the one rank that found out first.
        end: ends this process, at once.
        keeper: the rank whose process keeps the store, if one does: where it stops, the store does.
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
        self._attachment: LookoutHooks | None = None
        self._attachments = 0
        self.any_asked = False
        """Whether a rank of the training has been asked to stop, as was heard last."""
        self._sign, self._showing = Sign.here(), threading.Lock()
        self._near: dict[int, Sign] | None = None
        """The other ranks on this machine, once each has given a sign."""
        self._silence = Silence()
        self._stalled = 0.0
        self._timed: set[str] = set()
        self._writing, self._has_written = threading.Lock(), False
        self._away = threading.Event()
        """The main thread has nothing to lose any more."""
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, name="surefoot-lookout", daemon=True)
        self._show()

    def start(self) -> None:
        """Begins to look."""
        self._thread.start()
        if self._keeper not in (None, self.rank):
            threading.Thread(target=self._watch_store, name="surefoot-store", daemon=True).start()

    def accuse(self, store: dist.Store, failure: Failure) -> Failure:
        """Claims and tells of a rank that hangs, on the thread that has waited for it.

        Args:
            store: that of the calling thread.

        Returns:
            What counts: another may have said something before.
        """
        self.write_stacks(failure)
        counts = claim(store, failure)
        if counts == failure:
            self._tell(failure)
        return counts

    def write_stacks_of_all(self, store: dist.Store, failure: Failure) -> None:
        """The same as `write_stacks`, for who then leaves by itself; the others come first.

        Args:
            store: that of the calling thread.
        """
        self.write_stacks(failure)
        until = time.monotonic() + STACKS_SECONDS
        others = [rank for rank in range(self._size) if rank != self.rank]
        while failure.how is How.HANGS and not all_have_written(store, others, failure.rank):
            if time.monotonic() > until:
                return
            time.sleep(STACKS_POLL_SECONDS)

    def write_stacks(self, failure: Failure) -> None:
        """Writes down where this rank is, once, where the stacks of all may tell what happened."""
        with self._writing:
            attachment = self._attachment
            if attachment is None or failure.how is How.FAILED or self._has_written:
                return
            attachment.dump()
            self._has_written = True

    def stop(self) -> None:
        """Ends the look-out, for a process that comes to its own end; harmless when repeated."""
        if self._done.is_set():
            return
        self._away.set()
        self._done.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(LEAVE_SECONDS)
        if not self._thread.is_alive():
            with suppress(dist.DistError, RuntimeError):
                self._show(left=True)

    def wait_at_most(self, seconds: float) -> None:
        """Sets the deadline, also of the collectives of torch."""
        self._deadline = seconds
        self._timed.clear()

    @contextmanager
    def attached(self, attachment: LookoutHooks) -> Iterator[None]:
        """A training, which a loss ends together with its process."""
        self._away.clear()
        self._attachments += 1
        self.any_asked = False
        self._attachment = attachment
        # At once: a rank may hang from its first step on.
        with suppress(dist.DistError, RuntimeError):
            self._show()
        try:
            yield
        finally:
            self._attachment = None
            self._away.set()

    # -- the thread ----------------------------------------------------------------------------

    def _run(self) -> None:
        last = time.monotonic()
        # A store that is gone says that the launcher, or rank 0, is: others see to that.
        with suppress(dist.DistError, RuntimeError):
            while not self._done.wait(self._pause()):
                now = time.monotonic()
                # What this process slept through, or was stopped in, is held against nobody.
                self._look(min(now - last, 2 * LOOK_SECONDS))
                last = now
                failure = self.failure
                if failure is not None:
                    if failure.how is not How.FAILED or failure.rank != self.rank:
                        self._leave(failure)
                    return

    def _pause(self) -> float:
        return min(LOOK_SECONDS, self._deadline / LOOKS_PER_DEADLINE)

    def _look(self, seconds: float) -> None:
        calls = self._calls()
        self._stalled = self._stalled + seconds if calls == self._sign.calls else 0.0
        doing = self._attachment.doing() if self._attachment is not None else ""
        self._show(calls=calls, doing=doing)
        self._pass_on_what_is_asked()
        self.failure = first_failure(self._store)
        for found in self._look_around(seconds):
            if self.failure is None:
                self.failure = self.accuse(self._store, found)

    def _pass_on_what_is_asked(self) -> None:
        attachment, key = self._attachment, f"asked/{self._attachments}"
        if attachment is None or self.any_asked:
            return
        if attachment.asked():
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
        # Each looks at the next one: together they see all.
        next_rank = (self.rank + 1) % self._size
        signs = {r: s for r, s in read_signs(self._store, [next_rank]).items() if not s.left}
        rank, silent = self._silence.longest(signs, seconds)
        if silent > self._deadline:
            yield silent_failure(rank, signs[rank], silent, self.rank, rank in near)
        if self._stalled > self._deadline and self._attachment is not None:
            yield from self._look_who_is_late()

    def _near_ranks(self) -> dict[int, Sign]:
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
                limit_collectives(group, timedelta(seconds=BACKSTOP * self._deadline))
        return calls

    def _show(self, **news: Any) -> None:
        with self._showing:
            listens, count = self._attachment is not None, self._sign.count + 1
            news = {"listens": listens, "stacks": self._has_written, "count": count, **news}
            self._sign = replace(self._sign, **news)
            self._store.set(sign_key(self.rank), json.dumps(asdict(self._sign)))

    def _watch_store(self) -> None:
        """Ends this process where the store does not answer: nothing can be said through it."""
        assert self._keeper is not None
        silence, last = Silence(), time.monotonic()
        silent = 0.0
        while silent <= self._deadline:
            if self._done.wait(self._pause()) or not self._thread.is_alive():
                return
            now = time.monotonic()
            passed = min(now - last, 2 * LOOK_SECONDS)
            # This rank gives a sign each time that the store has answered all that was asked.
            _, silent = silence.longest({self._keeper: self._sign}, passed)
            last = now
        what = f"rank {self._keeper} hangs: it keeps the store, which is silent for {silent:.0f} s"
        failure = Failure(self._keeper, How.HANGS, self.rank, what, f"seen by rank {self.rank}")
        self._tell(failure)
        self.write_stacks(failure)
        self._record_and_end(failure, self._attachment)

    def _record_and_end(self, failure: Failure, attachment: LookoutHooks | None) -> None:
        if attachment is not None:
            attachment.record(failure.error(f"seen by rank {self.rank}"))
        self._end()

    def _leave(self, failure: Failure) -> None:
        attachment = self._attachment
        self.write_stacks(failure)
        self._show()
        # A main thread that can leaves by itself: it meets the same failure.
        left = self._away.wait(LEAVE_SECONDS)
        near = self._near_ranks()
        asks = min((rank for rank in (*near, self.rank) if rank != failure.rank), default=-1)
        if failure.how is How.HANGS and failure.rank in near and asks == self.rank:
            # Last, since it wakes up a process that was stopped.
            self.write_stacks_of_all(self._store, failure)
            ask_for_stacks(self._store, failure.rank)
        if not left:
            self._record_and_end(failure, attachment)


def ask_for_stacks(store: dist.Store, rank: int) -> None:
    """Makes a rank that trains on this machine write down its stacks, even if it is stopped."""
    sign = read_signs(store, [rank]).get(rank)
    if sign is None or not sign.listens or birth_of(sign.pid) != sign.born:
        return
    with suppress(OSError):
        os.kill(sign.pid, ASK_SIGNAL)
        os.kill(sign.pid, signal.SIGCONT)


def _end_process() -> None:
    # Whatever the main thread waits for, it may never come: nothing of its clean-up is run.
    for child in multiprocessing.active_children():
        child.kill()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(EXIT_FAILED)


_current: Lookout | None = None


def current() -> Lookout | None:
    """That of this process, where a launcher has started it as one of several ranks."""
    return _current


def begin(lookout: Lookout) -> None:
    """Makes it that of this process, and starts it."""
    global _current
    _current = lookout
    lookout.start()


def end() -> None:
    """Ends that of this process."""
    global _current
    if _current is not None:
        _current.stop()
        _current = None


def asked_elsewhere() -> bool:
    """Whether any rank has been asked to stop, as this one knows."""
    return _current is not None and _current.any_asked


@contextmanager
def attached(attachment: LookoutHooks) -> Iterator[None]:
    """A training in this process; nothing is different where it is alone."""
    if _current is None:
        yield
        return
    with _current.attached(attachment):
        yield
