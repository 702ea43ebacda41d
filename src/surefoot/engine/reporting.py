"""The log of updates: what is made of one whose numbers have arrived, and who hears of it.

Nothing here touches the device, and no number that is told changes one that is trained with.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from surefoot.core.errors import NonFiniteError
from surefoot.core.reports import Event, Observer, StepReport
from surefoot.engine.guard import Guard, event_of
from surefoot.engine.in_flight import DETAIL, PendingReport, UpdatesInFlight
from surefoot.engine.passes import RESERVED, TOTAL
from surefoot.engine.spike_guard import RolledBack
from surefoot.engine.window import Window, padding_waste
from surefoot.observe.time_ledger import Phase, TimeLedger
from surefoot.state.run_state import Progress
from surefoot.tasks.task import main_weight

INVESTIGATED = frozenset({"non-finite", "non-finite-loss", "skip", "spike"})
Investigation = Callable[[Event, Window, Mapping[str, float]], Mapping[str, object]]
"""(event, window, denominators) -> what the event's data gets besides."""


def no_findings(
    event: Event, window: Window, denominators: Mapping[str, float]
) -> Mapping[str, object]:
    """The investigation that looks into nothing."""
    return {}


NO_DETAILS: dict[str, float] = {}
KNOWN_SCALARS = RESERVED | {TOTAL}
NUM_WITHOUT_TERMS = 3
"""Loss, gradient norm and loss scale."""


def terms_of(scalars: Mapping[str, float]) -> dict[str, float]:
    """The terms of a loss that has several."""
    return {
        name: value for name, value in scalars.items() if name not in RESERVED and name != TOTAL
    }


class ReportLog(UpdatesInFlight):
    """Settles updates in order, and tells of each.

    Args:
        progress: the counts of the run.
        guard: judges each report; may raise.
        observers: receive each report and event.
        clip_norm: gradients with a larger norm were clipped; infinity where nothing is.
        counts_tokens: whether a weight is a number of tokens.
        memory_bytes: a cheap probe.
        investigate: looks into an update that went wrong, before anything else is done.

    Its `ledger` counts where the host's time goes.
    """

    def __init__(
        self,
        progress: Progress,
        guard: Guard,
        observers: Sequence[Observer] = (),
        *,
        clip_norm: float = float("inf"),
        counts_tokens: bool = False,
        memory_bytes: Callable[[], int] = lambda: 0,
        investigate: Investigation = no_findings,
    ) -> None:
        super().__init__(progress, counts_tokens)
        self.guard = guard
        self.observers = observers
        self.latest: StepReport | None = None
        self._clip_norm = clip_norm
        self._memory_bytes = memory_bytes
        self.ledger = TimeLedger()
        self._data_seconds = self._device_seconds = self._logging_seconds = 0.0
        self._investigate = investigate
        self._last_time = time.perf_counter()
        if guard.spikes.sets_limits:
            self.norm_limit = self._limit_of_spikes

    def _limit_of_spikes(self) -> float:
        return self.guard.spikes.norm_limit(in_flight=self._in_flight is not None)

    def book_times(self) -> None:
        """Books what the updates since the last time have spent waiting and logging.

        They run inside one phase: to switch it several times an update would cost more.
        """
        self.ledger.shift(Phase.LAUNCH, Phase.DATA_WAIT, self._data_seconds)
        self.ledger.shift(Phase.LAUNCH, Phase.DEVICE_WAIT, self._device_seconds)
        self.ledger.shift(Phase.LAUNCH, Phase.LOGGING, self._logging_seconds)
        self._data_seconds = self._device_seconds = self._logging_seconds = 0.0

    def restart_clock(self) -> None:
        """Forgets the time spent since the last update (an evaluation, a save)."""
        self._last_time = time.perf_counter()

    def tell(self, event: Event) -> None:
        for observer in self.observers:
            observer.on_event(event)

    def _with_evidence(self, event: Event, pending: PendingReport) -> Event:
        """The event with what the run finds out about it; nothing for a window without weight."""
        if event.kind not in INVESTIGATED or not any(pending.denominators.values()):
            return event
        found = self._investigate(event, pending.window, pending.denominators)
        return replace(event, data={**event.data, **found})

    def _explain(self, error: NonFiniteError, pending: PendingReport, report: StepReport) -> None:
        event = self._with_evidence(event_of("non-finite", report, error.what), pending)
        self.tell(event)
        if "meaning" in event.data:
            error.where += f"; {event.data['meaning']}"

    def _details(self, pending: PendingReport, scalars: dict[str, float]) -> dict[str, float]:
        """Takes the sampled numbers out of the scalars; adds those that the host knows."""
        names = [name for name in scalars if name.startswith(DETAIL)]
        details = {name.removeprefix(DETAIL): scalars.pop(name) for name in names}
        if (fraction := self.guard.clip_fraction(self.progress.window)) is not None:
            details["clip_fraction"] = fraction
        if self._counts_tokens and (share := padding_waste(pending.window)) is not None:
            details["padding_waste"] = share
        return details

    def _publish(
        self, pending: PendingReport, scalars: dict[str, float], applied: bool, asked: float
    ) -> None:
        arrived = time.perf_counter()
        window = pending.window
        details = self._details(pending, scalars) if pending.sent.is_sampled else NO_DETAILS
        # A device is behind the host: its update ends about when its numbers arrive. One that was
        # computed at once has ended then, however much later its report is settled.
        ended = self._handed_over if pending.sent.at_once else arrived
        report = StepReport(
            step=self.progress.step,
            window=self.progress.window,
            epoch=window.epoch,
            samples=self.progress.samples,
            tokens=self.progress.tokens,
            loss=scalars[TOTAL],
            terms=terms_of(scalars) if len(scalars) > NUM_WITHOUT_TERMS else NO_DETAILS,
            weight=main_weight(pending.denominators),
            grad_norm=scalars["grad_norm"],
            clipped=scalars["grad_norm"] > self._clip_norm,
            applied=applied,
            lr=pending.rates,
            loss_scale=scalars["loss_scale"],
            sample_ids=window.sample_ids,
            weight_norm=scalars.get("weight_norm"),
            details=details,
            step_seconds=ended - self._last_time,
            data_seconds=window.data_seconds,
            memory_bytes=self._memory_bytes(),
            time=time.time(),
            ends_epoch=window.cursor_after.epoch > window.epoch,
        )
        self._last_time = ended
        self.latest = report
        for observer in self.observers:
            observer.on_step(report)
        try:
            decision = self.guard.judge(report)
        except NonFiniteError as error:
            self._explain(error, pending, report)
            raise
        self._device_seconds += arrived - asked
        self._data_seconds += window.data_seconds
        self._logging_seconds += time.perf_counter() - arrived
        if decision is None:
            return
        self.tell(self._with_evidence(decision.event(), pending))
        if decision.roll_back is not None:
            raise RolledBack(decision.roll_back)
