"""Renders the live view: one view becomes one frame, or one plain line.

Pure: reads no clock, no terminal and no run.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from rich.align import Align
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from surefoot.core.reports import EvalReport, Event
from surefoot.observe.formatting import format_bytes, format_count, format_duration, format_number
from surefoot.observe.terminal.braille import Axes, braille_lines, sparkline
from surefoot.observe.terminal.view import State, View

MIN_WIDTH_WITH_CURVE = 76
MAX_WIDTH = 120
CURVE_ROWS = 7
QUIET_SECONDS = 5.0
SHOWN_EVALUATIONS = 3

_LABEL = "dim"
_MARK = "●"
_STYLE_OF_STATE: Mapping[State, str] = {
    "starting": "cyan",
    "training": "cyan",
    "finished": "green",
    "stopped": "yellow",
    "failed": "red",
}


def render_frame(view: View, width: int) -> RenderableType:
    """The live view as a frame of at most `width` columns."""
    width = min(width, MAX_WIDTH)
    style = _STYLE_OF_STATE[view.state]
    numbers = _numbers(view)
    body: RenderableType = numbers
    if width >= MIN_WIDTH_WITH_CURVE:
        body = Table.grid(padding=(0, 3))
        body.add_column(width=38)
        body.add_column()
        body.add_row(numbers, _curve(view, width - 4 - 38 - 3))
    parts: list[RenderableType] = [_progress(view, style), Text(), body, Text()]
    parts += _evaluations(view)
    parts.append(_note(view))
    title = Text.assemble((f"{view.facts.name} ", "bold not dim default"), (view.state, style))
    for fact in (view.facts.device, view.facts.precision):
        if fact:
            title.append(f" · {fact}", "dim default")
    return Panel(
        Group(*parts),
        title=title,
        title_align="left",
        subtitle=Text(_shortened(view.facts.folder, width - 8), "dim default"),
        subtitle_align="right",
        border_style=style if view.state in ("finished", "failed") else _LABEL,
        padding=(0, 1),
        width=width,
    )


def _progress(view: View, style: str) -> RenderableType:
    facts = view.facts
    share = min(1.0, view.done / facts.total) if facts.total > 0 else 1.0
    if facts.unit == "seconds":
        counts = f"{format_duration(view.done)} / {format_duration(facts.total)}"
    else:
        counts = f"{format_count(view.done)} / {format_count(facts.total)} {facts.unit}"
    if view.state in ("starting", "training"):
        left = "–" if view.remaining_seconds is None else format_duration(view.remaining_seconds)
        end = Text.assemble(("ETA ", _LABEL), (left, "bold"))
    else:
        end = Text.assemble(("took ", _LABEL), (format_duration(view.elapsed_seconds), "bold"))
    line = Table.grid(padding=(0, 2), expand=True)
    line.add_column(ratio=1)
    for _ in range(3):
        line.add_column(justify="right", no_wrap=True)
    bar = ProgressBar(
        total=1.0, completed=share, complete_style=style, finished_style=style, style="bright_black"
    )
    # Rounded down, so that 100 % means the end.
    line.add_row(bar, Text(f"{math.floor(share * 100)} %", "bold"), Text(counts), end)
    return line


def _numbers(view: View) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style=_LABEL, no_wrap=True)
    table.add_column(no_wrap=True)
    report = view.report
    unknown = Text("–", _LABEL)
    rows: list[tuple[str, Text]] = []
    if report is None:
        rows += [(label, unknown) for label in ("loss", "grad norm", "learning rate")]
    else:
        loss_style = "bold" if math.isfinite(report.loss) else "bold red"
        loss = Text(format_number(report.loss), loss_style)
        loss.append("  ").append(sparkline(view.recent), "cyan")
        norm = Text(format_number(report.grad_norm))
        norm.append("  ").append("clipped" if report.clipped else "", "yellow")
        rows += [("loss", loss), ("grad norm", norm), ("learning rate", Text(_rates(view)))]
    rows.append(("speed", Text(speed_text(view)) if view.speed is not None else unknown))
    rows.append(("update", Text(_duration_text(report.step_seconds)) if report else unknown))
    rows.append(("data wait", _share(view.data_wait) if report else unknown))
    rows.append(("memory", Text(format_bytes(report.memory_bytes)) if report else unknown))
    rows.append(("skipped", Text(str(view.skipped), "bold yellow" if view.skipped else "")))
    for label, value in rows:
        table.add_row(label, value)
    return table


def _curve(view: View, width: int) -> RenderableType:
    points, marks = view.curve, view.evaluation_curve
    if len(points) < 2:
        waiting = view.state in ("starting", "training")
        quiet = Text("waiting for the first updates" if waiting else "no loss curve", _LABEL)
        return Group(*[Text()] * (CURVE_ROWS // 2), Align.center(quiet, width=width))
    axes = Axes.around(points, marks)
    high, low = f"{axes.high:.3g}", f"{axes.low:.3g}"
    labels = [high, *[""] * (CURVE_ROWS - 2), low]
    label_width = max(len(high), len(low))
    inner = width - label_width - 1
    lines = [list(line) for line in braille_lines(points, axes, inner, CURVE_ROWS)]
    for mark in marks:
        column, row = axes.place(mark, inner * 2, CURVE_ROWS * 4)
        lines[row // 4][column // 2] = _MARK
    texts = []
    for label, line in zip(labels, lines, strict=True):
        text = Text().append(f"{label:>{label_width}} ", _LABEL).append("".join(line), "cyan")
        text.highlight_regex(_MARK, "yellow")
        texts.append(text)
    return Group(*texts, _curve_legend(axes, label_width + 1, inner, bool(marks)))


def _curve_legend(axes: Axes, indent: int, inner: int, has_marks: bool) -> Text:
    left, right = f"{axes.left:,.0f}", f"{axes.right:,.0f}"
    middle = Text().append("─", "cyan").append(" loss", _LABEL)
    if has_marks:
        middle.append(f"  {_MARK}", "yellow").append(" validation", _LABEL)
    gap = inner - len(left) - len(right) - len(middle)
    if gap < 2:
        middle, gap = Text(), inner - len(left) - len(right)
    text = Text().append(" " * indent + left + " " * (gap // 2), _LABEL).append(middle)
    return text.append(" " * (gap - gap // 2) + right, _LABEL)


def _evaluations(view: View) -> list[RenderableType]:
    shown = view.evaluations[:SHOWN_EVALUATIONS]
    if not shown:
        return [Text("no evaluation yet", _LABEL)]
    width = max(len(_set_name(report)) for report in shown)
    lines: list[RenderableType] = []
    for report in shown:
        line = Text(no_wrap=True, overflow="ellipsis")
        line.append(f"{_set_name(report):<{width}}", "yellow")
        line.append(f"  step {report.step:,}", _LABEL)
        for name, value in report.metrics.items():
            line.append(f"  {name} ", _LABEL).append(format_number(value), "bold")
        lines.append(line)
    return lines


def _note(view: View) -> Text:
    text = Text(no_wrap=True, overflow="ellipsis")
    if view.report is not None:
        text.append(f"epoch {view.report.epoch} · ", _LABEL)
    text.append(f"{format_duration(view.elapsed_seconds)} elapsed", _LABEL)
    usual = view.report.step_seconds if view.report else 0.0
    if view.state == "training" and view.quiet_seconds > max(QUIET_SECONDS, 3 * usual):
        text.append(f" · last update {format_duration(view.quiet_seconds)} ago", "yellow")
    if view.note:
        text.append(" · ", _LABEL)
        text.append(" ".join(view.note.split()), "red" if view.state == "failed" else "")
    return text


# -- pieces ------------------------------------------------------------------------------------


def speed_text(view: View) -> str:
    """The speed with its unit, such as `18,240 tokens/s`."""
    speed = view.speed or 0.0
    digits = f"{speed:.1f}" if speed < 100 else format_count(speed)
    return f"{digits} {view.facts.counts}/s"


def _rates(view: View) -> str:
    rates = sorted(set(view.report.lr.values())) if view.report else []
    shown = [f"{rate:.2e}" for rate in (rates if len(rates) < 3 else (rates[0], rates[-1]))]
    return (" … " if len(rates) > 2 else " · ").join(shown)


def _share(value: float | None) -> Text:
    if value is None:
        return Text("–", _LABEL)
    return Text(f"{value * 100:.1f} %", "yellow" if value > 0.2 else "")


def _duration_text(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"


def _set_name(report: EvalReport) -> str:
    return report.name if report.weights == "raw" else f"{report.name} ({report.weights})"


def _shortened(path: str, width: int) -> str:
    return path if len(path) <= width else "…" + path[1 - width :]


# -- plain lines -------------------------------------------------------------------------------


def plain_step_line(view: View) -> str:
    """One line for a log file: step, loss, grad_norm, lr, speed, ETA."""
    report = view.report
    if report is None:
        return ""
    facts = view.facts
    step = f"step {report.step}"
    if facts.unit == "steps":
        step += f"/{facts.total:.0f}"
    else:
        step += f" ({100 * min(1.0, view.done / facts.total):.0f} %)" if facts.total > 0 else ""
    left = "-" if view.remaining_seconds is None else format_duration(view.remaining_seconds)
    parts = [
        step,
        f"loss {format_number(report.loss)}",
        f"grad_norm {format_number(report.grad_norm)}",
        f"lr {_rates(view)}",
        speed_text(view) if view.speed is not None else f"- {facts.counts}/s",
        f"ETA {left}",
    ]
    if view.skipped:
        parts.append(f"skipped {view.skipped}")
    return "  ".join(parts)


def plain_eval_line(report: EvalReport) -> str:
    """One line for an evaluation."""
    metrics = "  ".join(f"{name} {format_number(value)}" for name, value in report.metrics.items())
    return f"eval {_set_name(report)} at step {report.step}  {metrics}"


def plain_event_line(event: Event) -> str:
    """One line for an event."""
    return f"{event.kind} at step {event.step}: {' '.join(event.message.split())}"
