"""Cheap probes of memory and load, made to be called once per update.

They return cached values and measure a few times per second at most. They never synchronize with a
device and never raise for a missing driver.
"""

from __future__ import annotations

import os
import resource
import sys
import threading
import time
from collections.abc import Callable

import pynvml
import torch

from surefoot.core.errors import SurefootError
from surefoot.core.peaks import model_flops_utilization

REFRESH_SECONDS = 0.25
UTILIZATION_SECONDS = 1.0


class MemoryProbe:
    """Bytes in use, for `StepReport.memory_bytes`: call it.

    CUDA: peak of the memory allocated by torch. MPS: currently allocated. CPU: resident memory of
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
    # Without /proc only the peak is cheap to read; macOS reports bytes, others KiB.
    unit = 1 if sys.platform == "darwin" else 1024
    return lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


_PAGE_BYTES = resource.getpagesize()


def _resident_bytes() -> int:
    with open("/proc/self/statm", "rb", buffering=0) as file:
        return int(file.read(128).split()[1]) * _PAGE_BYTES


class UtilizationProbe:
    """Share of time that the device was busy recently, 0 to 1, or None if unknown: call it.

    CUDA: share of the driver's sample period in which a kernel ran, read once a second by a
    separate thread. CPU: processor time of this process over wall time and usable cores, over the
    last second. None until the first second has passed.
    """

    def __init__(self, device: torch.device | str) -> None:
        self._device = torch.device(device)
        self._value: float | None = None
        self.energy_joules: float | None = None
        """Joules used by the device since this probe was made; None if unknown."""
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
        """Ends the thread; idempotent."""
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
        # The first query loads the driver's library: done here, it is over before training starts.
        read_energy = _energy_reader(self._device)
        began = read_energy()
        while True:
            now = read_energy()
            self.energy_joules = None if now is None or began is None else now - began
            try:
                self._value = torch.cuda.utilization(self._device) / 100
            except Exception:
                # No driver library or no permission: unknown, and the run continues.
                self._value = None
                return
            if self._stopping.wait(UTILIZATION_SECONDS):
                return


def _energy_reader(device: torch.device) -> Callable[[], float | None]:
    """Joules since the driver was loaded, from NVML; None if unsupported (before Volta)."""
    try:
        pynvml.nvmlInit()
        uuid = str(torch.cuda.get_device_properties(device).uuid)
        name = uuid if uuid.startswith("GPU-") else f"GPU-{uuid}"
        handle = pynvml.nvmlDeviceGetHandleByUUID(name)
        pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)
    except Exception:
        return lambda: None

    def read() -> float | None:
        try:
            return float(pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)) / 1000.0
        except Exception:
            return None

    return read


class ResourceProbe:
    """Memory, energy and MFU of a device, for the metrics log's `resources`: call it with a speed.

    Args:
        device: where the model is.
        energy_joules: used so far, or None.
        flops_per_sample: of one sample's forward and backward; None if unknown.
        peak: FLOP/s of all devices of the run; None if unknown.
        tell: called once if the utilization is above 1, which is impossible.
    """

    def __init__(
        self,
        device: torch.device,
        energy_joules: Callable[[], float | None],
        flops_per_sample: float | None = None,
        peak: float | None = None,
        tell: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._device = device
        self._energy_joules = energy_joules
        self._flops_per_sample = flops_per_sample
        self._peak = peak
        self._tell = tell

    def __call__(self, samples_per_second: float | None) -> dict[str, float | None]:
        found: dict[str, float | None] = {"energy_joules": self._energy_joules()}
        if self._device.type == "cuda":
            found["memory_allocated_bytes"] = torch.cuda.memory_allocated(self._device)
            found["memory_reserved_bytes"] = torch.cuda.memory_reserved(self._device)
        if samples_per_second and self._flops_per_sample and self._peak:
            found["mfu"] = self._mfu(samples_per_second * self._flops_per_sample, self._peak)
        return found

    def _mfu(self, flops_per_second: float, peak: float) -> float | None:
        try:
            return model_flops_utilization(flops_per_second, peak)
        except SurefootError as error:
            self._tell(str(error))
            self._tell = lambda text: None
            return None
