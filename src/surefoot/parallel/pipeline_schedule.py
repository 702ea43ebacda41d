"""Pipeline schedules: the stages of each rank, the idle fraction, and torch's implementation.

Holds no model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import torch

from surefoot.config.sections.parallel import ParallelSection
from surefoot.core.errors import RequestError

Kind = Literal["gpipe", "1f1b", "interleaved", "zero-bubble"]
STAGES_PER_RANK: Final[dict[Kind, int]] = {
    "gpipe": 1,
    "1f1b": 1,
    "interleaved": 2,
    "zero-bubble": 1,
}
"""Used if `stages_per_rank` is `as-schedule`."""
ONE_STAGE: Final = ("gpipe", "1f1b")


@dataclass(frozen=True)
class PipelineOrder:
    """A schedule over a number of ranks; needs no process group.

    Args:
        kind: name of the schedule.
        num_ranks: along the pipeline axis.
        stages_per_rank: number of stages per rank.
    """

    kind: Kind
    num_ranks: int
    stages_per_rank: int

    @classmethod
    def of(cls, section: ParallelSection, num_ranks: int) -> PipelineOrder:
        """The schedule that a recipe asks for.

        Raises:
            RequestError: the schedule does not support that many stages per rank.
        """
        kind, asked = section.pipeline_schedule, section.stages_per_rank
        number = STAGES_PER_RANK[kind] if asked == "as-schedule" else int(asked)
        if number > 1 and kind in ONE_STAGE:
            raise RequestError(
                f"parallel.stages_per_rank is {number}, and the schedule is {kind}",
                where="parallel.stages_per_rank",
                rule=f"{kind} has one stage per rank",
                remedy="leave it out, or use parallel.pipeline_schedule=interleaved",
            )
        return cls(kind, num_ranks, number)

    @property
    def num_stages(self) -> int:
        return self.num_ranks * self.stages_per_rank

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages of one rank of the axis, in model order."""
        return tuple(range(rank, self.num_stages, self.num_ranks))

    def rank_of(self, stage: int) -> int:
        """The rank of the axis that holds a stage."""
        return stage % self.num_ranks

    def takes(self, num_micro_batches: int) -> bool:
        """Whether the schedule supports a window of this many micro-batches."""
        if self.kind == "1f1b":
            return num_micro_batches >= self.num_stages
        if self.kind == "gpipe":
            return True
        return num_micro_batches % max(1, num_micro_batches // self.num_ranks) == 0

    def check_window(self, num_micro_batches: int) -> None:
        """Refuses window lengths that the schedule does not support; a short last one is accepted.

        Raises:
            RequestError: with the nearest supported length.
        """
        if self.takes(num_micro_batches):
            return
        near = next(n for n in range(num_micro_batches + 1, 10**9) if self.takes(n))
        needs = (
            f"at least as many micro-batches as stages ({self.num_stages})"
            if self.kind == "1f1b"
            else f"micro-batches in equal rounds of a size that {self.num_ranks} goes into them"
        )
        raise RequestError(
            f"a window of {num_micro_batches} micro-batches, and the schedule is {self.kind}",
            where="train.accumulation",
            rule=f"{self.kind} takes {needs}",
            remedy=f"use train.accumulation={near}, or parallel.pipeline_schedule=gpipe",
        )

    def bubble_fraction(self, num_micro_batches: int) -> float:
        """Fraction of an update's forward and backward in which a rank idles, in [0, 1).

        For p ranks, m micro-batches and v stages per rank, if all stages take equally long and both
        parts of a backward (input gradients, weight gradients) as long as a forward:

        - GPipe (Huang et al. 2019, section 2.3) and 1F1B: (p - 1) / (m + p - 1);
        - interleaved (Narayanan et al. 2021, section 2.2.2; there over the ideal time, here over
          the total): (p - 1) / (v m + p - 1) for m >= p; each of the v passes takes at least p
          steps;
        - zero-bubble, ZB-H1 (Qi et al. 2024, "Zero Bubble Pipeline Parallelism", section 2.3) with
            v stages: a third of the idle time, (p - 1) / (3 v m + p - 1) for m >= p, and at least
            that for fewer.

        >>> round(PipelineOrder("1f1b", 4, 1).bubble_fraction(8), 3)
        0.273
        >>> round(PipelineOrder("interleaved", 4, 2).bubble_fraction(8), 3)
        0.158
        >>> round(PipelineOrder("zero-bubble", 4, 1).bubble_fraction(8), 3)
        0.111
        """
        p, m, v = self.num_ranks, num_micro_batches, self.stages_per_rank
        if self.kind == "zero-bubble":
            return (p - 1) / (3 * v * m + p - 1)
        steps = (v - 1) * max(m, p) + m + p - 1
        return 1.0 - v * m / steps

    def schedule(self, stages: Sequence[Any], num_micro_batches: int, loss: Any) -> Any:
        """Torch's schedule over the stages of this rank.

        A short window that the schedule does not support runs all forwards, then all backwards;
        since it is shorter than the pipeline, this keeps no more activations.

        Args:
            stages: torch's stages of this rank.
            loss: `(output, target) -> loss` of one micro-batch; None for a forward only.
        """
        # Imports the compiler, which takes a second: only if there are stages.
        from torch.distributed.pipelining import schedules

        options: dict[str, Any] = {
            "n_microbatches": num_micro_batches,
            "loss_fn": loss,
            "scale_grads": False,
        }
        own = loss is not None and self.takes(num_micro_batches)
        if own and self.kind == "zero-bubble":
            return schedules.ScheduleInterleavedZeroBubble(list(stages), **options)
        if own and self.kind == "interleaved":
            return schedules.ScheduleInterleaved1F1B(list(stages), **options)
        if self.stages_per_rank > 1:
            return schedules.ScheduleLoopedBFS(list(stages), **options)
        if own and self.kind == "1f1b":
            return schedules.Schedule1F1B(stages[0], **options)
        return schedules.ScheduleGPipe(stages[0], **options)


def run_schedule(schedule: Any, num_micro_batches: int) -> None:
    """Runs all micro-batches; each stage tracks which one is next.

    Raises:
        Exception: what a stage raised, without torch's wrapper.
    """
    try:
        # Passed to the loss by torch: the index of the micro-batch.
        schedule.step(target=torch.arange(num_micro_batches))
    except RuntimeError as error:
        if error.__cause__ is not None:
            raise error.__cause__ from None
        raise
