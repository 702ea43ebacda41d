"""Probes answer from memory, look afresh now and then, and need no driver."""

from __future__ import annotations

import mmap
import time

import psutil
import pytest
import torch

from surefoot.observe import probes
from surefoot.observe.probes import MemoryProbe, ResourceProbe, UtilizationProbe


def test_resident_memory_is_that_of_the_process() -> None:
    probe = MemoryProbe("cpu")
    before = probe.fresh()
    assert abs(before - psutil.Process().memory_info().rss) < 64 * 2**20
    # Pages of its own: an allocator may hand out memory that the process holds already.
    with mmap.mmap(-1, 64 * 2**20) as pages:
        pages.write(b"\1" * len(pages))
        assert probe.fresh() - before > 48 * 2**20


def test_the_probe_looks_afresh_only_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = []
    now = [50.0]
    monkeypatch.setattr(probes, "_resident_bytes", lambda: looks.append(0) or len(looks))
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    probe = MemoryProbe("cpu")
    assert [probe() for _ in range(10)] == [1] * 10
    now[0] += probes.REFRESH_SECONDS
    assert [probe() for _ in range(10)] == [2] * 10
    assert probe.fresh() == 3


def test_the_device_is_asked_for_its_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(
        torch.cuda, "max_memory_allocated", lambda device: asked.append(device) or 12345
    )
    assert MemoryProbe("cuda:1")() == 12345
    assert asked == [torch.device("cuda:1")]


def test_a_working_process_is_busy_and_nobody_knows_before(monkeypatch: pytest.MonkeyPatch) -> None:
    wall, busy = [10.0], [1.0]
    monkeypatch.setattr(time, "monotonic", lambda: wall[0])
    monkeypatch.setattr(time, "process_time", lambda: busy[0])
    probe = UtilizationProbe("cpu")
    probe._cores = 2
    assert probe() is None
    wall[0] += 2.0
    busy[0] += 1.0
    assert probe() == 0.25
    wall[0] += 0.5
    busy[0] += 1.0
    assert probe() == 0.25
    wall[0] += 0.5
    assert probe() == 0.5
    probe.close()


def test_the_driver_is_asked_by_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "UTILIZATION_SECONDS", 0.001)
    monkeypatch.setattr(torch.cuda, "utilization", lambda device: 83)
    probe = UtilizationProbe("cuda")
    deadline = time.monotonic() + 10
    while probe() is None and time.monotonic() < deadline:
        time.sleep(0.001)
    assert probe() == 0.83
    probe.close()
    probe.close()


def test_without_a_driver_nobody_knows_and_the_run_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(device: object) -> int:
        raise RuntimeError("no driver")

    monkeypatch.setattr(probes, "UTILIZATION_SECONDS", 0.001)
    monkeypatch.setattr(torch.cuda, "utilization", refuse)
    probe = UtilizationProbe("cuda")
    assert probe._thread is not None
    probe._thread.join(timeout=10)
    assert not probe._thread.is_alive()
    assert probe() is None
    probe.close()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_both_probes_answer() -> None:
    block = torch.ones(32 * 2**20, dtype=torch.uint8, device="cuda")
    assert MemoryProbe("cuda")() >= block.numel()
    probe = UtilizationProbe("cuda")
    deadline = time.monotonic() + 20
    while probe() is None and time.monotonic() < deadline:
        time.sleep(0.1)
    value = probe()
    probe.close()
    assert value is not None
    assert 0 <= value <= 1


def test_a_utilization_that_cannot_be_is_said_once_and_not_recorded() -> None:
    told: list[str] = []
    probe = ResourceProbe(torch.device("cpu"), lambda: 7.0, 100.0, 1000.0, told.append)
    assert probe(5.0) == {"energy_joules": 7.0, "mfu": 0.5}
    assert probe(11.0)["mfu"] is probe(12.0)["mfu"] is None
    assert len(told) == 1 and "110%" in told[0]
    assert "mfu" not in probe(None)
    assert "mfu" not in ResourceProbe(torch.device("cpu"), lambda: None)(5.0)
