"""Code on a GPU in which each wait of the host for the device is an error."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def no_host_sync() -> Iterator[None]:
    """Inside, torch raises where the host waits for the device."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch says, once, that the mode is a prototype
            torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
