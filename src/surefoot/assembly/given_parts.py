"""Parts of an update that Python code hands in: optimizer, schedule, clip and sampler.

The configuration of such a run says `kind: given` with the part's name; the part itself is kept
here, because no file can hold it.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, TypedDict

from torch.utils.data import Sampler

from surefoot.core.errors import RequestError
from surefoot.core.own_schedule import as_schedule
from surefoot.core.schedules import Schedule
from surefoot.core.targets import name_of
from surefoot.data.order import SampleOrder
from surefoot.numerics.clipping import Clip
from surefoot.optim.own import MakeOptimizer
from surefoot.tasks.given import MetricFunction

OwnSchedule = Schedule | Callable[[int], float]
OwnSampler = SampleOrder | Sampler[int] | Callable[[Any], SampleOrder | Sampler[int]]


class OwnParts(TypedDict, total=False):
    """Keyword arguments of `Trainer` that bring parts of one's own."""

    optimizer: MakeOptimizer
    """A class or function from parameter groups to a `torch.optim.Optimizer`, such as
    `torch.optim.RAdam`. The groups are the ledger's; rate and decay are those of
    `settings["optimizer"]`, which then has no `kind`."""
    schedule: OwnSchedule
    """A function from the number of updates completed to a multiplier of the peak rate."""
    clip: Clip
    """A function `(gradients, norm)` that changes the gradients in place, on their device."""
    sampler: OwnSampler
    """A `SampleOrder`, a torch `Sampler`, or a function from the training set to one."""
    metrics: Mapping[str, MetricFunction] | None
    """Further metrics of the evaluation, by name."""
    observers: Sequence[object]
    """Objects with some of the methods of `Observer`; they receive every report and cannot change
    the run."""


@dataclass(frozen=True)
class GivenParts:
    """What was handed in; None where the settings name the part."""

    optimizer: MakeOptimizer | None = None
    schedule: Schedule | None = None
    clip: Clip | None = None
    sampler: OwnSampler | None = None

    @classmethod
    def of(
        cls,
        optimizer: MakeOptimizer | None = None,
        schedule: OwnSchedule | None = None,
        clip: Clip | None = None,
        sampler: OwnSampler | None = None,
    ) -> GivenParts:
        """Checks what can be checked before there is a model.

        Raises:
            RequestError: a part cannot be called, or is a class where an object is meant.
        """
        for name, part in (("optimizer", optimizer), ("clip", clip)):
            if part is not None and not callable(part):
                raise RequestError(
                    f"the {name} is a {type(part).__name__}",
                    where=name,
                    rule="an optimizer is a class or function of parameter groups, a clip one of "
                    "(gradients, norm)",
                    remedy="give the class, such as torch.optim.RAdam, not an optimizer that is "
                    "made already"
                    if name == "optimizer"
                    else "give a function",
                )
        if isinstance(clip, type):
            raise RequestError(
                f"the clip is the class {clip.__name__}",
                where="clip",
                rule="a clip is called with (gradients, norm)",
                remedy=f"call it: {clip.__name__}(...)",
            )
        made = None if schedule is None else as_schedule(schedule)
        return cls(optimizer, made, clip, sampler)

    def names(self) -> dict[str, str]:
        """Dotted path of the section that each part stands for, and the part's name."""
        paths = {field.name: field.name for field in fields(self)} | {"clip": "train.clip"}
        found = {paths[field.name]: getattr(self, field.name) for field in fields(self)}
        return {path: _label(part) for path, part in found.items() if part is not None}


NOTHING_GIVEN = GivenParts()


def check_names(parts: Mapping[str, Any]) -> None:
    """Refuses a keyword that is no part, as Python does.

    Raises:
        TypeError: with the keyword that was likely meant.
    """
    known = OwnParts.__annotations__
    for name in parts:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            meant = f"; did you mean {near[0]}?" if near else ""
            raise TypeError(f"Trainer got an unexpected keyword argument {name!r}{meant}")


def _label(part: Any) -> str:
    return getattr(part, "name", "") if hasattr(part, "function") else name_of(part)
