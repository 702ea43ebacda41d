"""What a loss means: each task gives the weight, the loss sum and the metric sums of a batch."""

from surefoot.tasks.classification import ClassificationTask
from surefoot.tasks.generation import GenerationTask
from surefoot.tasks.multilabel import MultilabelTask
from surefoot.tasks.regression import RegressionTask
from surefoot.tasks.task import FunctionTask, Task, count_samples

__all__ = [
    "ClassificationTask",
    "FunctionTask",
    "GenerationTask",
    "MultilabelTask",
    "RegressionTask",
    "Task",
    "count_samples",
]
