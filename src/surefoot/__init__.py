"""Surefoot trains PyTorch models and proves that the training is right.

The public names are loaded when they are first used, so that `import surefoot` loads no torch.
Nothing is defined here, and no module of the library imports from here.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from surefoot.core.errors import SurefootError as SurefootError

__version__ = "0.1.0"

_HOME_OF = {
    "SurefootError": "surefoot.core.errors",
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
