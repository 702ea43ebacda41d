"""What a person hands in as model, task and metrics, as a module and a task; changes neither."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Protocol

from torch import Tensor, nn

from surefoot.core.errors import ModelError, RequestError
from surefoot.tasks.task import (
    FunctionTask,
    LossSum,
    MetricSums,
    Task,
    checked_metric,
)
from surefoot.tasks.wrapper import TaskWrapper


class MetricFunction(Protocol):
    """`(model, batch) -> (numerator, denominator)`, both sums over the batch.

    An evaluation adds both up over all batches and ranks and divides once, so that the metric is
    the same for any batch size.

    >>> def mean_output(model: nn.Module, batch: Tensor) -> tuple[Tensor, float]:
    ...     outputs = model(batch)
    ...     return outputs.sum(), float(outputs.numel())
    >>> metric: MetricFunction = mean_output
    """

    def __call__(self, model: nn.Module, batch: Any, /) -> tuple[Tensor, float | Tensor]: ...


def as_task(task: Task | Callable[[nn.Module, Any], LossSum]) -> Task:
    """The task itself, or the task of a plain loss that sums over the samples of a batch.

    Raises:
        RequestError: it is a class, a loss of torch's that knows no model, or cannot be called.
    """
    name = getattr(task, "__name__", type(task).__name__)
    rule = "a task is one of surefoot.*Task, or a function loss(model, batch) -> sum"
    if isinstance(task, type):
        raise RequestError(
            f"the task is the class {name}", rule=rule, remedy=f"call it: {name}(...)"
        )
    if isinstance(task, nn.Module) or not (callable(task) or isinstance(task, Task)):
        raise RequestError(
            f"the task is a {type(task).__name__}",
            rule=rule,
            remedy="take the task that fits, such as ClassificationTask(num_classes), or write a "
            "function that calls the model and returns the loss summed over the batch",
        )
    return task if isinstance(task, Task) else FunctionTask(task)


def checked_model(model: Any) -> nn.Module:
    """The model, if it is one.

    Raises:
        RequestError: it is no module, such as a class that was not called.
    """
    if isinstance(model, nn.Module):
        return model
    is_class = isinstance(model, type)
    raise RequestError(
        f"the model is {'the class' if is_class else 'a'} "
        f"{model.__name__ if is_class else type(model).__name__}",
        rule="a model is a torch.nn.Module",
        remedy=f"call it: {model.__name__}(...)" if is_class else "wrap it in a module",
    )


class TaskWithMetrics(TaskWrapper):
    """A task with further metrics in its evaluation."""

    def __init__(self, task: Task, metrics: Mapping[str, MetricFunction]) -> None:
        super().__init__(task)
        self.metrics = dict(metrics)

    def metric_sums(self, model: nn.Module, batch: Any) -> MetricSums:
        further = {
            name: checked_metric(name, metric(model, batch))
            for name, metric in self.metrics.items()
        }
        own = self.task.metric_sums(model, batch)
        if taken := sorted(own.keys() & further.keys()):
            raise ModelError(
                f"a metric may not be called {taken[0]!r}",
                where="metrics",
                rule=f"the task has the metrics {', '.join(sorted(own))}",
                remedy="rename the metric",
            )
        return {**own, **further}


def with_metrics(task: Task, metrics: Mapping[str, MetricFunction]) -> Task:
    """The task, with these metrics besides its own."""
    if isinstance(task, FunctionTask):
        return replace(task, metrics={**task.metrics, **metrics})
    return TaskWithMetrics(task, metrics) if metrics else task
