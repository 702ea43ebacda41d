"""Surefoot trains PyTorch models and proves that the training is right.

The public names are loaded when they are first used, so that `import surefoot` loads no torch.
Nothing is defined here, and no module of the library imports from here.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from surefoot.build import load as load
    from surefoot.config.sections import Settings as Settings
    from surefoot.core.errors import SurefootError as SurefootError
    from surefoot.tasks.classification import ClassificationTask as ClassificationTask
    from surefoot.tasks.generation import GenerationTask as GenerationTask
    from surefoot.tasks.multilabel import MultilabelTask as MultilabelTask
    from surefoot.tasks.regression import RegressionTask as RegressionTask
    from surefoot.tasks.task import FunctionTask as FunctionTask
    from surefoot.train_step import TrainStep as TrainStep
    from surefoot.trainer import Trainer as Trainer

__version__ = "0.1.0"

_HOME_OF = {
    "ClassificationTask": "surefoot.tasks.classification",
    "FunctionTask": "surefoot.tasks.task",
    "GenerationTask": "surefoot.tasks.generation",
    "MultilabelTask": "surefoot.tasks.multilabel",
    "RegressionTask": "surefoot.tasks.regression",
    "Settings": "surefoot.config.sections",
    "SurefootError": "surefoot.core.errors",
    "TrainStep": "surefoot.train_step",
    "Trainer": "surefoot.trainer",
    "load": "surefoot.build",
}

__all__ = [*_HOME_OF, "__version__"]


def __getattr__(name: str) -> object:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'surefoot' has no attribute {name!r}")
    value = getattr(import_module(_HOME_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
