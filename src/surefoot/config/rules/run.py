"""Rules of a run: optimizer, precision, evaluation, and what may be counted in tokens."""

from __future__ import annotations

from collections.abc import Iterator

from surefoot.config.rules.rule import Rule, broken, named_metric, spans
from surefoot.config.sections.data import DataSection
from surefoot.config.sections.optimizers import OptimizerSection, SGDSection
from surefoot.config.sections.run import (
    CheckpointSection,
    EarlyStoppingSection,
    EmaSection,
    EvaluateSection,
    GuardSection,
    PrecisionSection,
    TrainSection,
)
from surefoot.config.sections.schedules import PlateauSection, ScheduleSection
from surefoot.config.sections.tasks import (
    CustomTaskSection,
    FunctionSection,
    RegressionSection,
    TaskSection,
)
from surefoot.core.errors import Violation
from surefoot.core.units import Tokens


def nesterov_needs_momentum(optimizer: OptimizerSection) -> Iterator[Violation]:
    """Nesterov's step uses the momentum."""
    if isinstance(optimizer, SGDSection) and optimizer.nesterov and not optimizer.momentum:
        yield broken(
            "optimizer.nesterov",
            "Nesterov needs a momentum, and optimizer.momentum is 0",
            "use optimizer.momentum=0.9, or optimizer.nesterov=false",
        )


def static_loss_scale_is_for_fp16(precision: PrecisionSection) -> Iterator[Violation]:
    """Only fp16 has a range too small for unscaled gradients."""
    if precision.dtype != "fp16" and precision.loss_scale != "dynamic":
        yield broken(
            "precision.loss_scale",
            f"a loss scale is for fp16, and precision.dtype is {precision.dtype}",
            "leave it out, or use precision.dtype=fp16",
        )


def average_must_be_kept_to_be_evaluated(
    evaluate: EvaluateSection, ema: EmaSection
) -> Iterator[Violation]:
    """The moving average can be evaluated only if it is kept."""
    if evaluate.weights == "ema" and ema.kind == "off":
        yield broken(
            "evaluate.weights",
            "evaluates the moving average, and ema.kind is off",
            "use ema.kind=on, or evaluate.weights=raw",
        )


def early_stopping_needs_evaluations(
    early_stopping: EarlyStoppingSection, evaluate: EvaluateSection
) -> Iterator[Violation]:
    """A metric that is measured at the end, or never, cannot stop a run."""
    if early_stopping.kind == "on" and evaluate.every in ("end", "never"):
        yield broken(
            "early_stopping.kind",
            f"watches {named_metric(early_stopping.metric)}, and evaluate.every is "
            f"{evaluate.every}",
            'use evaluate.every=epoch, or for example "100 steps"',
        )


def metrics_need_a_validation_set(
    data: DataSection,
    evaluate: EvaluateSection,
    schedule: ScheduleSection,
    early_stopping: EarlyStoppingSection,
) -> Iterator[Violation]:
    """Without held-out data there is no metric to watch."""
    if getattr(data, "validation_path", "none") != "none" or data.validation_fraction:
        return
    if getattr(data, "validation_target", "none") != "none":
        return
    for path, watches in (
        ("early_stopping.kind", early_stopping.kind == "on"),
        ("schedule.kind", isinstance(schedule, PlateauSection)),
    ):
        if watches:
            yield broken(
                path,
                "watches a metric, and data.validation_fraction is 0",
                "hold out a share of the data, such as data.validation_fraction=0.1",
            )


def counts_tokens(task: TaskSection) -> bool | None:
    """Whether the task counts tokens; None if only its own code knows."""
    if isinstance(task, CustomTaskSection):
        return None
    return task.unit == "tokens" if isinstance(task, FunctionSection) else task.kind == "generation"


def tokens_must_be_counted(
    task: TaskSection,
    train: TrainSection,
    schedule: ScheduleSection,
    evaluate: EvaluateSection,
    checkpoint: CheckpointSection,
) -> Iterator[Violation]:
    """A span in tokens needs a task that counts them."""
    if counts_tokens(task) is not False:
        return
    given = [
        ("train.horizon", train.horizon),
        ("evaluate.every", evaluate.every),
        ("checkpoint.every", checkpoint.every),
        *spans(schedule),
    ]
    for path, value in given:
        if isinstance(value, Tokens):
            yield broken(
                path,
                f"is given in tokens, and the task {task.kind} does not count tokens",
                "give it in steps, samples or epochs",
            )


def delta_is_for_huber(task: TaskSection) -> Iterator[Violation]:
    """Only the Huber loss has a delta; elsewhere it would be ignored."""
    if isinstance(task, RegressionSection) and task.loss != "huber" and task.delta != 1.0:
        yield broken(
            "task.delta",
            f"delta is a parameter of the Huber loss, and task.loss is {task.loss}",
            "leave it out, or use task.loss=huber",
        )


def the_spike_must_be_left_out(guard: GuardSection) -> Iterator[Violation]:
    """A run that rolls back and meets the same spike again has gained nothing."""
    if guard.spikes == "roll-back" and guard.leave_out_windows <= guard.roll_back_updates:
        yield broken(
            "guard.leave_out_windows",
            f"skips {guard.leave_out_windows} windows starting {guard.roll_back_updates} updates "
            "before the spike (guard.roll_back_updates): the spike is not skipped",
            "skip more windows than updates are undone",
        )


RULES: tuple[Rule, ...] = (
    nesterov_needs_momentum,
    static_loss_scale_is_for_fp16,
    average_must_be_kept_to_be_evaluated,
    early_stopping_needs_evaluations,
    metrics_need_a_validation_set,
    tokens_must_be_counted,
    delta_is_for_huber,
    the_spike_must_be_left_out,
)
