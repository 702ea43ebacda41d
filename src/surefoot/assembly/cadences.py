"""From the counts of the settings to when something is due and where a run ends. Holds no state."""

from __future__ import annotations

from dataclasses import dataclass

from surefoot.config.sections import Settings
from surefoot.core.counting import Pace, updates_in
from surefoot.core.errors import RequestError
from surefoot.core.units import Count, Epochs, Flops, Samples, Seconds, Steps, Tokens
from surefoot.data.plan import DataPlan
from surefoot.engine.cadence import AtEnd, Cadence, Every, Horizon, Unit


@dataclass(frozen=True)
class Cadences:
    """When something is due in a run, and where it ends."""

    horizon: Horizon
    evaluate_every: Cadence
    save_every: Cadence
    ephemeral_every: Cadence
    compare_ranks_every: Cadence


def make_cadences(settings: Settings, plan: DataPlan, pace: Pace, num_ranks: int) -> Cadences:
    """Turns the counts of the settings into what a run counts exactly."""

    def every(count: Count | str) -> Cadence:
        if isinstance(count, Count):
            return make_every(count, plan, pace)
        return AtEnd() if count in ("end", "never") else make_every(Epochs(1), plan, pace)

    end = make_every(settings.train.horizon, plan, pace)
    return Cadences(
        horizon=Horizon(end.amount, end.unit),
        evaluate_every=every(settings.evaluate.every),
        save_every=every(settings.checkpoint.every),
        ephemeral_every=every(settings.checkpoint.ephemeral_every),
        compare_ranks_every=every(settings.guard.compare_ranks_every) if num_ranks > 1 else AtEnd(),
    )


def make_every(count: Count, plan: DataPlan, pace: Pace) -> Every:
    """A count as what a run counts exactly.

    Raises:
        RequestError: it counts neither data nor updates nor time.
    """
    match count:
        case Steps():
            return Every(count.value, Unit.STEPS)
        case Samples():
            return Every(count.value, Unit.SAMPLES)
        case Tokens():
            return Every(count.value, Unit.TOKENS)
        case Seconds():
            return Every(count.value, Unit.SECONDS)
        case Epochs():
            if plan.samples_per_epoch is None:
                return Every(count.value, Unit.EPOCHS)
            return Every(count.value * plan.samples_per_epoch, Unit.SAMPLES)
        case Flops():
            updates = updates_in(count, pace)
            assert isinstance(updates, int)
            return Every(updates, Unit.STEPS)
        case _:
            raise RequestError(f"{count} is not a length of a run", rule="a count of steps or data")
