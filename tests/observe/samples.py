"""Reports to write and to show."""

from __future__ import annotations

from surefoot.core.reports import EvalReport, StepReport

REPORT = StepReport(
    step=3,
    window=4,
    epoch=1,
    samples=128,
    tokens=4096,
    loss=2.5,
    terms={"ce": 2.0, "z": 0.5},
    weight=1024.0,
    grad_norm=0.1 + 0.2,
    clipped=False,
    applied=True,
    lr={"decay": 3e-4, "no_decay": 3e-4},
    loss_scale=65536.0,
    sample_ids=(5, 9, 2**40),
    step_seconds=0.5,
    data_seconds=0.001,
    memory_bytes=123,
    time=1.75e9,
)
EVALUATION = EvalReport(
    step=3, name="validation", metrics={"loss": 2.4}, weight=512.0, samples=16, seconds=0.2
)


def report(window: int, **fields: object) -> StepReport:
    counts = {"step": window, "window": window, "samples": 32 * window, "tokens": 1024 * window}
    return REPORT._replace(**(counts | fields))
