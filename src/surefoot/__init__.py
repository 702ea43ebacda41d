"""Surefoot trains PyTorch models and proves that the training is right.

The public names are loaded when they are first used, so that `import surefoot` loads no torch.
Nothing is defined here, and no module of the library imports from here.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from surefoot.build import LoadedRun, load, run_recipe
    from surefoot.config.load import load_recipe
    from surefoot.config.sections import Settings
    from surefoot.core.errors import ConfigError, SurefootError
    from surefoot.core.finding import Finding
    from surefoot.core.reports import EvalReport, Event, Observer, StepReport
    from surefoot.core.schedules import Schedule
    from surefoot.data.augment import AugmentedSource
    from surefoot.data.collate import PaddingCollate
    from surefoot.data.order import SampleOrder
    from surefoot.data.sources.base import Source
    from surefoot.data.sources.datasets import DatasetSource
    from surefoot.data.sources.stream import StreamSource
    from surefoot.run.folder_run import RunResult
    from surefoot.sanitizer.session import audit
    from surefoot.tasks.classification import ClassificationTask
    from surefoot.tasks.generation import GenerationTask
    from surefoot.tasks.given import MetricFunction
    from surefoot.tasks.multilabel import MultilabelTask
    from surefoot.tasks.regression import RegressionTask
    from surefoot.tasks.task import FunctionTask, Task
    from surefoot.train_step import TrainStep
    from surefoot.trainer import Trainer

__version__ = "0.1.0"

__all__ = [
    "AugmentedSource",
    "ClassificationTask",
    "ConfigError",
    "DatasetSource",
    "EvalReport",
    "Event",
    "Finding",
    "FunctionTask",
    "GenerationTask",
    "LoadedRun",
    "MetricFunction",
    "MultilabelTask",
    "Observer",
    "PaddingCollate",
    "RegressionTask",
    "RunResult",
    "SampleOrder",
    "Schedule",
    "Settings",
    "Source",
    "StepReport",
    "StreamSource",
    "SurefootError",
    "Task",
    "TrainStep",
    "Trainer",
    "__version__",
    "audit",
    "load",
    "load_recipe",
    "run_recipe",
]

_HOME_OF = {
    "AugmentedSource": "surefoot.data.augment",
    "ClassificationTask": "surefoot.tasks.classification",
    "ConfigError": "surefoot.core.errors",
    "DatasetSource": "surefoot.data.sources.datasets",
    "EvalReport": "surefoot.core.reports",
    "Event": "surefoot.core.reports",
    "Finding": "surefoot.core.finding",
    "FunctionTask": "surefoot.tasks.task",
    "GenerationTask": "surefoot.tasks.generation",
    "LoadedRun": "surefoot.build",
    "MetricFunction": "surefoot.tasks.given",
    "MultilabelTask": "surefoot.tasks.multilabel",
    "Observer": "surefoot.core.reports",
    "PaddingCollate": "surefoot.data.collate",
    "RegressionTask": "surefoot.tasks.regression",
    "RunResult": "surefoot.run.folder_run",
    "SampleOrder": "surefoot.data.order",
    "Schedule": "surefoot.core.schedules",
    "Settings": "surefoot.config.sections",
    "Source": "surefoot.data.sources.base",
    "StepReport": "surefoot.core.reports",
    "StreamSource": "surefoot.data.sources.stream",
    "SurefootError": "surefoot.core.errors",
    "Task": "surefoot.tasks.task",
    "TrainStep": "surefoot.train_step",
    "Trainer": "surefoot.trainer",
    "audit": "surefoot.sanitizer.session",
    "load": "surefoot.build",
    "load_recipe": "surefoot.config.load",
    "run_recipe": "surefoot.build",
}


def __getattr__(name: str) -> object:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'surefoot' has no attribute {name!r}")
    value = getattr(import_module(_HOME_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
