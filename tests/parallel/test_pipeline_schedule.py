"""Which stages lie where, what windows a schedule takes, and how long ranks idle in it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from torch import nn
from torch.distributed.pipelining.schedules import ScheduleInterleaved1F1B

from surefoot.config.sections.parallel import ParallelSection
from surefoot.core.errors import RequestError
from surefoot.parallel.pipeline import runs_of_blocks
from surefoot.parallel.pipeline_schedule import Kind, PipelineOrder

SECONDS = {"FORWARD": 1, "BACKWARD_INPUT": 1, "BACKWARD_WEIGHT": 1, "FULL_BACKWARD": 2}
LOSS = object()


@dataclass
class Place:
    """As much of a stage as a schedule asks for while it is made."""

    stage_index: int
    num_stages: int
    group_size: int
    group_rank: int

    has_backward = True
    submod = nn.Identity()

    @property
    def is_first(self) -> bool:
        return self.stage_index == 0

    @property
    def is_last(self) -> bool:
        return self.stage_index == self.num_stages - 1


def table(order: PipelineOrder, number: int) -> dict[int, list[Any]]:
    """What each rank does, one thing after the other, as torch has planned it."""
    places = [Place(s, order.num_stages, order.num_ranks, 0) for s in order.stages_of(0)]
    if order.kind == "1f1b" and order.takes(number):
        # Its own table is for show, and one micro-batch off; interleaved of one stage is the same.
        schedule: Any = ScheduleInterleaved1F1B(places, number, LOSS)
    else:
        schedule = order.schedule(places, number, LOSS)
    planned = getattr(schedule, "pipeline_order", None) or schedule._get_pipeline_order()
    return {rank: [a for a in actions if a is not None] for rank, actions in planned.items()}


def idle_fraction(order: PipelineOrder, number: int) -> float:
    """Of rank 0, where each rank begins what is next as soon as it can."""
    left = table(order, number)
    done: dict[tuple[str, int, int], int] = {}
    clock = dict.fromkeys(left, 0)
    busy = dict.fromkeys(left, 0)
    steps = 0
    while any(left.values()):
        steps += 1
        assert steps < 1000, "the ranks wait for each other"
        for rank, actions in left.items():
            while actions:
                kind, stage = actions[0].computation_type.name, actions[0].stage_index
                if kind not in SECONDS:
                    actions.pop(0)
                    continue
                index = actions[0].microbatch_index
                before = [("forward", stage - 1, index)] if stage else []
                if kind != "FORWARD":
                    before = [("forward", stage, index)]
                    if kind == "BACKWARD_WEIGHT":
                        before = [("backward", stage, index)]
                    elif stage + 1 < order.num_stages:
                        before.append(("backward", stage + 1, index))
                if not all(thing in done for thing in before):
                    break
                clock[rank] = max([clock[rank], *(done[thing] for thing in before)])
                clock[rank] += SECONDS[kind]
                busy[rank] += SECONDS[kind]
                what = "forward" if kind == "FORWARD" else "backward"
                if kind != "BACKWARD_WEIGHT":
                    done[what, stage, index] = clock[rank]
                actions.pop(0)
    return 1 - busy[0] / max(clock.values())


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize(
    ("kind", "stages_per_rank"),
    [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zero-bubble", 1), ("zero-bubble", 2)],
)
def test_the_bubble_is_that_of_torchs_tables(
    kind: Kind, stages_per_rank: int, num_ranks: int
) -> None:
    order = PipelineOrder(kind, num_ranks, stages_per_rank)
    for number in (4, 8, 16):
        idle = idle_fraction(order, number)
        assert order.bubble_fraction(number) == pytest.approx(idle, rel=1e-12)
    for few in range(1, num_ranks):
        idle = idle_fraction(order, few)
        assert order.bubble_fraction(few) <= idle + 1e-12


def test_stages_go_round_the_ranks() -> None:
    order = PipelineOrder("interleaved", 2, 2)
    assert [order.stages_of(rank) for rank in (0, 1)] == [(0, 2), (1, 3)]
    assert [order.rank_of(stage) for stage in range(4)] == [0, 1, 0, 1]


def test_the_first_stages_hold_one_layer_more() -> None:
    order = PipelineOrder("1f1b", 4, 1)
    assert runs_of_blocks(10, order) == [range(3), range(3, 6), range(6, 8), range(8, 10)]
    assert runs_of_blocks(4, order) == [range(1), range(1, 2), range(2, 3), range(3, 4)]


def test_how_many_stages_a_rank_holds() -> None:
    def stages(**options: Any) -> int:
        section = ParallelSection(**{"pipeline": 2, **options})
        return PipelineOrder.of(section, 2).num_stages

    assert stages() == 2
    assert stages(pipeline_schedule="interleaved") == 4
    assert stages(pipeline_schedule="interleaved", stages_per_rank=3) == 6
    assert stages(pipeline_schedule="zero-bubble") == 2
    with pytest.raises(RequestError, match="1f1b has one stage per rank"):
        stages(stages_per_rank=2)


def test_a_window_that_a_schedule_does_not_take_has_a_nearest_that_it_does() -> None:
    order = PipelineOrder("zero-bubble", 4, 1)
    for number in (1, 3, 4, 6, 8, 10, 12):
        order.check_window(number)
    with pytest.raises(RequestError, match=r"use train\.accumulation=10,"):
        order.check_window(9)
    with pytest.raises(RequestError, match=r"use train\.accumulation=4,"):
        PipelineOrder("1f1b", 4, 1).check_window(2)
