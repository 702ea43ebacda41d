"""From the counts of a configuration to when something is due and where a run ends.

It holds no state.
"""

from __future__ import annotations

from surefoot.assembly.run_parts import Assembly
from surefoot.config.sections import Settings
from surefoot.core.counting import updates_in
from surefoot.core.errors import RequestError
from surefoot.core.units import Count, Epochs, Flops, Samples, Seconds, Steps, Tokens
from surefoot.data.sources.stream import StreamPlan
from surefoot.engine.cadence import AtEnd, Cadence, Every, Horizon, Unit


def make_horizon(settings: Settings, assembly: Assembly) -> Horizon:
    """Where the run ends, in what it counts exactly."""
    every = _every(settings.train.horizon, assembly)
    return Horizon(every.amount, every.unit)


def make_cadence(count: Count | str, assembly: Assembly) -> Cadence:
    """When something is due."""
    if isinstance(count, Count):
        return _every(count, assembly)
    return AtEnd() if count in ("end", "never") else _every(Epochs(1), assembly)


def _every(count: Count, assembly: Assembly) -> Every:
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
            if isinstance(assembly.plan, StreamPlan):
                return Every(count.value, Unit.EPOCHS)
            return Every(count.value * assembly.plan.samples_per_epoch, Unit.SAMPLES)
        case Flops():
            updates = updates_in(count, assembly.pace)
            assert isinstance(updates, int)
            return Every(updates, Unit.STEPS)
        case _:
            raise RequestError(f"{count} is not a length of a run", rule="a count of steps or data")
