"""Cheap probes of memory and load, made to be asked once an update.

They answer from memory and look afresh a few times a second at most. They never synchronise with a
device and never raise because a machine has no driver.
"""

from __future__ import annotations

import os
import resource
import sys
import threading
import time
from collections.abc import Callable

import torch

REFRESH_SECONDS = 0.25
UTILIZATION_SECONDS = 1.0


class MemoryProbe:
    """Bytes in use, for `StepReport.memory_bytes`: call it.

    CUDA: peak of the memory that torch has allocated. MPS: allocated now. CPU: resident memory of
    this process, without its workers.

    Args:
        device: where the model is.
    """

    def __init__(self, device: torch.device | str) -> None:
        self._measure = _memory_reader(torch.device(device))
        self._bytes = 0
        self._due = 0.0

    def __call__(self) -> int:
        now = time.monotonic()
        if now >= self._due:
            self._due = now + REFRESH_SECONDS
            self._bytes = self._measure()
        return self._bytes

    def fresh(self) -> int:
        """Measures now."""
        self._due = 0.0
        return self()


def _memory_reader(device: torch.device) -> Callable[[], int]:
    if device.type == "cuda":
        return lambda: int(torch.cuda.max_memory_allocated(device))
    if device.type == "mps":
        return lambda: int(torch.mps.current_allocated_memory())
    if os.path.exists("/proc/self/statm"):
        return _resident_bytes
    # Without /proc only the peak is to be had cheaply; macOS counts it in bytes, others in KiB.
    unit = 1 if sys.platform == "darwin" else 1024
    return lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


_PAGE_BYTES = resource.getpagesize()


def _resident_bytes() -> int:
    with open("/proc/self/statm", "rb", buffering=0) as file:
        return int(file.read(128).split()[1]) * _PAGE_BYTES


class UtilizationProbe:
    """Share of time that the device was busy lately, 0 to 1, or None where nobody knows: call it.

    CUDA: share of the driver's sample period in which a kernel ran, asked once a second by a
    thread of its own. CPU: processor time of this process over wall time and the cores it may use,
    over the last second. It is None until the first second has passed.
    """

    def __init__(self, device: torch.device | str) -> None:
        self._device = torch.device(device)
        self._value: float | None = None
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 0
        self._cores = self._cores or os.cpu_count() or 1
        self._wall = time.monotonic()
        self._busy = time.process_time()
        if self._device.type == "cuda":
            self._thread = threading.Thread(
                target=self._watch_driver, name="surefoot-utilization", daemon=True
            )
            self._thread.start()

    def __call__(self) -> float | None:
        if self._device.type == "cpu":
            self._count_process_time()
        return self._value

    def close(self) -> None:
        """Ends the thread; harmless when called twice."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join(timeout=2)
            self._thread = None

    def _count_process_time(self) -> None:
        now = time.monotonic()
        elapsed = now - self._wall
        if elapsed >= UTILIZATION_SECONDS:
            busy = time.process_time()
            self._value = round(min(1.0, (busy - self._busy) / elapsed / self._cores), 4)
            self._wall, self._busy = now, busy

    def _watch_driver(self) -> None:
        # The first question loads the driver's library: asked at once, it is over before training.
        while True:
            try:
                self._value = torch.cuda.utilization(self._device) / 100
            except Exception:
                # No driver library or no permission: nobody knows, and the run goes on.
                self._value = None
                return
            if self._stopping.wait(UTILIZATION_SECONDS):
                return
