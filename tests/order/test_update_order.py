"""An update is the nine numbered parts of `step.py`, in that order, observed from outside.

The update under test is taken apart by its numbers: leaving one part out, or swapping any two,
gives another trace (or fails), so no part can be lost or moved unseen.
"""

from __future__ import annotations

import ast
import inspect
import itertools
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from surefoot.core.reports import Event, StepReport
from surefoot.data.batch import MicroBatch
from surefoot.data.order import Cursor
from surefoot.engine import step as step_module
from surefoot.engine.guard import Guard
from surefoot.engine.in_flight import PendingReport
from surefoot.engine.measure.signals import MeasuredSignals
from surefoot.engine.passes import PlainPass
from surefoot.engine.reporting import ReportLog
from surefoot.engine.step import Update, UpdateParts
from surefoot.engine.window import Window, gather_window
from surefoot.numerics.clipping import ClipNorm, global_norm, gradients_of, weight_norm
from surefoot.numerics.loss_scaling import DynamicLossScale
from surefoot.numerics.precision import choose_precision
from surefoot.optim.ema import WeightEma
from surefoot.optim.update import UpdateOptimizer
from surefoot.state.run_state import Progress
from surefoot.tasks.task import FunctionTask

NUM_PARTS = 9
NUM_UPDATES = 3
PEAK_RATE = 0.5
MAX_NORM = 0.01


def squared_error(model: nn.Module, batch: Any) -> Tensor:
    inputs, targets = batch
    return (model(inputs) - targets).square().sum()


def make_window(n: int) -> Window:
    generator = torch.Generator().manual_seed(n)
    sizes = (3, 1)
    return gather_window(
        [
            MicroBatch(
                data=(torch.randn(size, 4, generator=generator), torch.ones(size, 1)),
                weights={"loss": float(size)},
                samples=size,
                ids=tuple(range(size)),
                cursor_after=Cursor(0, n),
                ends_window=index == len(sizes) - 1,
            )
            for index, size in enumerate(sizes)
        ]
    )


class Trace:
    """Everything that happens in an update, seen through the seams and hooks that users have."""

    def __init__(self) -> None:
        self.events: list[tuple[Any, ...]] = []
        torch.manual_seed(0)
        self.model = nn.Linear(4, 1, bias=False)
        (self.weight,) = self.model.parameters()
        groups = [{"params": [self.weight], "name": "all", "parameter_names": ["weight"]}]
        optimizer = torch.optim.AdamW(groups, lr=PEAK_RATE, fused=True)
        self.optimizer = UpdateOptimizer(optimizer, skipping=True)
        self.model.register_forward_pre_hook(lambda *_: self.add("forward", self.gradient()))
        self.weight.register_post_accumulate_grad_hook(lambda _: self.add("backward"))
        optimizer.register_step_pre_hook(lambda *_: self.add("step", self.rate(), self.gradient()))
        self.parts = UpdateParts(
            parameters=[self.weight],
            sum_over_ranks=self.sum_over_ranks,
            run_pass=PlainPass(
                self.model, FunctionTask(squared_error), choose_precision("fp32", "cpu")
            ),
            loss_scale=DynamicLossScale(initial=1024.0, growth_interval=2),
            gradients_of=gradients_of,
            global_norm=self.norm,
            clip=ClipNorm(MAX_NORM),
            course=lambda step: (1.0 / (1 + step), None),
            optimizer=self.optimizer,
            average=WeightEma(self.model, 0.5),
            signals=MeasuredSignals(lambda: weight_norm([self.weight]), 1),
            log=TracedLog(self),
        )

    def add(self, name: str, *values: Any) -> None:
        self.events.append((name, *values))

    def gradient(self) -> list[float] | None:
        return None if self.weight.grad is None else self.weight.grad.flatten().tolist()

    def rate(self) -> float:
        return self.optimizer.rates()["all"]

    def sum_over_ranks(self, weights: Mapping[str, float]) -> Mapping[str, float]:
        self.add("denominators", dict(weights), self.gradient())
        return weights

    def norm(self, gradients: Sequence[Tensor]) -> Tensor:
        self.add("norm", [gradient.flatten().tolist() for gradient in gradients])
        return global_norm(gradients)

    def averages(self) -> list[float]:
        (average,) = self.parts.average.averages.values()  # type: ignore[attr-defined]
        return average.flatten().tolist()


class TracedLog(ReportLog):
    """The real log; says when it is asked to settle and what is handed over."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        super().__init__(Progress(), Guard(), [trace_observer(trace)], clip_norm=MAX_NORM)

    def settle(self) -> int:
        if self._in_flight is not None:
            self.trace.add("settle")
        return super().settle()

    def hand_over(self, pending: PendingReport) -> None:
        self.trace.add(
            "hand over",
            pending.sent.read(),
            dict(pending.rates),
            self.trace.weight.flatten().tolist(),
            self.trace.averages(),
            float(self.trace.parts.loss_scale.value),
        )
        super().hand_over(pending)


def trace_observer(trace: Trace) -> Any:
    class Seen:
        def on_step(self, report: StepReport) -> None:
            trace.add("report", report.step, report.loss, report.grad_norm, report.clipped)

        def on_event(self, event: Event) -> None:
            trace.add(event.kind, event.step)

    return Seen()


def run(update_class: Callable[[UpdateParts], Callable[[Window], None]]) -> list[tuple[Any, ...]]:
    trace = Trace()
    update = update_class(trace.parts)
    for n in range(NUM_UPDATES):
        update(make_window(n))
    trace.parts.log.settle()
    return trace.events


def test_an_update_is_the_nine_parts_in_order() -> None:
    events = run(Update)
    names = [event[0] for event in events]
    one = ["denominators", *["forward", "backward"] * 2, "norm"]
    rest = ["step", "hand over"]
    settled = ["settle", "report"]
    assert names == [*one, *rest, *(one + settled + rest) * (NUM_UPDATES - 1), *settled]


def test_what_each_part_sees() -> None:
    events = run(Update)
    by_name = {name: [e[1:] for e in events if e[0] == name] for name in {e[0] for e in events}}
    # Part 1 comes first: no gradient is left when the denominators are summed, nor at a forward.
    assert all(
        weights == {"loss": 4.0} and gradient is None
        for weights, gradient in by_name["denominators"]
    )
    assert [gradient is None for (gradient,) in by_name["forward"]] == [True, False] * NUM_UPDATES
    reports = by_name["report"]
    # The norm is of unscaled, unclipped gradients; the step sees clipped ones.
    for ((measured,),), (_, gradient), (_, _, norm, clipped) in zip(
        by_name["norm"], by_name["step"], reports, strict=True
    ):
        assert float(torch.tensor(measured).norm()) == pytest.approx(norm, rel=1e-6)
        assert norm < 100 and clipped
        assert float(torch.tensor(gradient).norm()) == pytest.approx(MAX_NORM, rel=1e-3)
    # Update n uses the rate of n, because the update before was settled first.
    assert [rate for rate, _ in by_name["step"]] == [
        PEAK_RATE / (1 + n) for n in range(NUM_UPDATES)
    ]
    assert [report[0] for report in reports] == [1, 2, 3]
    # The scale grows after two good updates; the report holds the scale that the update used.
    assert [float(scalars["loss_scale"]) for scalars, *_ in by_name["hand over"]] == [
        1024,
        1024,
        2048,
    ]
    assert [scale for *_, scale in by_name["hand over"]] == [1024, 2048, 2048]
    # The average followed the weights that the step had just written.
    average = torch.tensor(Trace().averages())
    for _, _, weights, averaged, _ in by_name["hand over"]:
        average = average + 0.5 * (torch.tensor(weights) - average)
        torch.testing.assert_close(torch.tensor(averaged), average)


def numbered_parts() -> list[list[ast.stmt]]:
    """The statements of `Update.__call__` below each numbered comment."""
    source = textwrap.dedent(inspect.getsource(Update.__call__))
    starts = [
        number
        for number, line in enumerate(source.splitlines(), 1)
        if line.strip().startswith(tuple(f"# {n}. " for n in range(1, NUM_PARTS + 1)))
    ]
    assert len(starts) == NUM_PARTS
    function = ast.parse(source).body[0]
    assert isinstance(function, ast.FunctionDef)
    body = [s for s in function.body if s.lineno > starts[0]]
    borders = [*starts, 10**6]
    return [[s for s in body if borders[i] < s.lineno < borders[i + 1]] for i in range(NUM_PARTS)]


def mutated(statements: Sequence[ast.stmt]) -> type:
    """An `Update` whose call runs these statements."""
    source = textwrap.dedent(inspect.getsource(Update.__call__))
    module = ast.parse(source)
    function = module.body[0]
    assert isinstance(function, ast.FunctionDef)
    first = [s for s in function.body if s.lineno < numbered_parts()[0][0].lineno]
    function.body = [*first, *statements]
    scope = dict(vars(step_module))
    exec(compile(ast.fix_missing_locations(module), "mutant", "exec"), scope)
    return type("Mutant", (Update,), {"__call__": scope["__call__"]})


def differs(statements: Sequence[ast.stmt]) -> bool:
    try:
        return run(mutated(statements)) != run(Update)
    except Exception:
        return True


def test_the_taken_apart_update_is_the_update() -> None:
    assert not differs(list(itertools.chain.from_iterable(numbered_parts())))


@pytest.mark.parametrize("left_out", range(NUM_PARTS))
def test_no_part_can_be_left_out(left_out: int) -> None:
    parts = numbered_parts()
    del parts[left_out]
    assert differs([s for part in parts for s in part])


def test_no_statement_can_be_left_out() -> None:
    statements = [s for part in numbered_parts() for s in part]
    for index, statement in enumerate(statements):
        assert differs(statements[:index] + statements[index + 1 :]) or is_skip(statement), (
            ast.unparse(statement)
        )


def is_skip(statement: ast.stmt) -> bool:
    """The branch for a window without weight, which this trace does not take."""
    return isinstance(statement, ast.If)


@pytest.mark.parametrize(("one", "other"), list(itertools.combinations(range(NUM_PARTS), 2)))
def test_no_two_parts_can_be_swapped(one: int, other: int) -> None:
    parts = numbered_parts()
    parts[one], parts[other] = parts[other], parts[one]
    assert differs([s for part in parts for s in part])


def test_a_window_without_weight_changes_nothing_and_is_recorded() -> None:
    trace = Trace()
    before = trace.weight.detach().clone()
    update = Update(trace.parts)
    window = make_window(0)
    empty = Window(window.micro_batches, {"loss": 0.0}, 4, window.sample_ids, window.cursor_after)
    update(empty)
    update(make_window(1))
    assert trace.parts.log.settle() == 1
    names = [e[0] for e in trace.events]
    assert names[:3] == ["denominators", "hand over", "denominators"]
    assert ("skip", 0) in trace.events and "step" not in names[: names.index("skip")]
    assert trace.parts.log.progress.window == 2
    assert not torch.equal(before, trace.weight)
    assert trace.events[-1][:2] == ("report", 1)
