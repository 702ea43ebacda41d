"""What observing costs the run, in microseconds an update. Prints; asserts nothing.

Run: `python benchmarks/observe_cost.py`. Each number is the smallest mean of several rounds: a busy
machine disturbs it least.
"""

from __future__ import annotations

import io
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from surefoot.core.reports import StepReport
from surefoot.observe.console import ConsoleView
from surefoot.observe.ledger import Phase, TimeLedger
from surefoot.observe.metrics_log import MetricsLog
from surefoot.observe.observers import Observers
from surefoot.observe.probes import MemoryProbe, UtilizationProbe
from surefoot.observe.view import RunFacts

ROUNDS = 15
CALLS = 2000

REPORT = StepReport(
    step=12345,
    window=12346,
    epoch=3,
    samples=987654,
    tokens=123456789,
    loss=2.3456789012345,
    terms={},
    weight=16384.0,
    grad_norm=0.4123456789,
    clipped=False,
    applied=True,
    lr={"decay": 3e-4, "no_decay": 3e-4},
    loss_scale=1.0,
    sample_ids=tuple(range(100_000, 100_032)),
    step_seconds=0.0123456789,
    data_seconds=0.00012345,
    memory_bytes=123456789,
    time=1.7e9 + 0.123,
)


def microseconds(call: Callable[[], object]) -> float:
    """The smallest mean time of one call."""
    best = float("inf")
    for _ in range(ROUNDS):
        begin = time.perf_counter()
        for _ in range(CALLS):
            call()
        best = min(best, (time.perf_counter() - begin) / CALLS)
    return best * 1e6


def switch_phase(ledger: TimeLedger) -> Callable[[], None]:
    """Two switches: in and out."""
    scope = ledger.phase(Phase.DATA_WAIT)

    def switch() -> None:
        with scope:
            pass

    return switch


def main() -> None:
    """Measures and prints."""
    facts = RunFacts("bench", "runs/bench", total=1e6)
    with tempfile.TemporaryDirectory() as folder:
        utilization = UtilizationProbe("cpu")
        log = MetricsLog(Path(folder) / "metrics.jsonl", utilization)
        console = ConsoleView(facts, "plain", io.StringIO()).start()
        observers = Observers([log], [console])
        empty = microseconds(lambda: None)
        rows = {
            "metrics log, one row": lambda: log.on_step(REPORT),
            "console, one report": lambda: console.on_step(REPORT),
            "both, through the fan-out": lambda: observers.on_step(REPORT),
            "memory probe": MemoryProbe("cpu"),
            "utilization probe": utilization,
            "ledger, one switch": switch_phase(TimeLedger()),
        }
        for name, call in rows.items():
            cost = microseconds(call) - empty
            cost = cost / 2 if name.startswith("ledger") else cost
            print(f"{name:28} {cost:7.2f} µs")
        observers.close()


if __name__ == "__main__":
    main()
