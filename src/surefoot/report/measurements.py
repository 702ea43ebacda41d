"""The middle of a run's page: metrics by validation set, host time, memory, data samples."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from surefoot.core.stopping import LARGER_IS_BETTER, SMALLER_IS_BETTER
from surefoot.judge.verdict import ContractVerdict, Standing
from surefoot.observe.events import EventKind
from surefoot.observe.readers.run_data import RunData
from surefoot.observe.time_ledger import TIME_LEDGER_NAME
from surefoot.report.markup import PageSection, chip, details, duration, escape, size, table, tag
from surefoot.report.markup import number as shown

DATA_SHEET = "data-sheet.json"
NUM_COLOURS = 6


def slices_section(run: RunData, verdict: ContractVerdict | None) -> PageSection:
    """Every validation set and metric: first, best and last value, and the baseline's."""
    body = _slices(run, verdict) or '<p class="soft">Nothing has been evaluated yet.</p>'
    return PageSection("slices", "Slices", body)


def _slices(run: RunData, verdict: ContractVerdict | None) -> str:
    baseline = _baseline_values(run)
    standings = (
        {clause.name.removeprefix("slices."): clause for clause in verdict.clauses}
        if verdict
        else {}
    )
    _, deciding, direction = run.deciding
    rows = []
    for name in run.latest():
        history = run.history(name)
        values = [(step, value) for step, value in history if math.isfinite(value)]
        metric = name.partition("/")[2]
        sign = _sign(metric, deciding, direction)
        best = min(values, key=lambda pair: sign * pair[1]) if values and sign else None
        row: list[object] = [
            name,
            shown(history[0][1]),
            f"{shown(best[1])} at {best[0]:,}" if best else "–",
            f"{shown(history[-1][1])} at {history[-1][0]:,}",
        ]
        if baseline:
            row += [shown(baseline.get(name)), _change(history[-1][1], baseline.get(name))]
            clause = standings.get(name)
            level = {Standing.HELD: "good", Standing.BROKEN: "bad"}
            row.append(
                chip(clause.standing.value, level.get(clause.standing, "warn")) if clause else ""
            )
        rows.append(row)
    if not rows:
        return ""
    head = ["set / metric", "first", "best", "last"]
    head += ["baseline", "change", ""] if baseline else []
    return table(head, rows, numbers=(1, 2, 3, 4, 5) if baseline else (1, 2, 3))


def _sign(metric: str, deciding: str, direction: str) -> int:
    """1 if smaller is better, -1 if larger is; 0 if unknown."""
    if metric == deciding.rpartition("/")[2]:
        return 1 if direction == "min" else -1
    if metric in SMALLER_IS_BETTER:
        return 1
    return -1 if metric in LARGER_IS_BETTER else 0


def _colour(index: int) -> str:
    return f"var(--c{index})" if index < NUM_COLOURS else "var(--line-strong)"


def _baseline_values(run: RunData) -> Mapping[str, float]:
    baseline = run.contract.get("baseline")
    values = baseline.get("values") if isinstance(baseline, Mapping) else None
    return {str(k): float(v) for k, v in values.items()} if isinstance(values, Mapping) else {}


def _change(value: float, before: float | None) -> str:
    if before is None or not math.isfinite(value):
        return "–"
    return f"{value - before:+.4g}"


def time_section(run: RunData) -> PageSection:
    """Host time by phase, as shares of the total."""
    parts = [(name, seconds) for name, seconds in host_time(run) if seconds > 0]
    whole = sum(seconds for _, seconds in parts)
    if not whole:
        return PageSection("time", "Time", '<p class="soft">No time has been recorded yet.</p>')
    bar = "".join(
        f'<span style="width:{100 * seconds / whole:.2f}%;background:{_colour(i)}" '
        f'title="{escape(name)}"></span>'
        for i, (name, seconds) in enumerate(parts)
    )
    rows = [
        (
            tag(
                "span",
                tag("span", class_="swatch", style=f"background:{_colour(i)}"),
                name,
            ),
            duration(seconds),
            f"{100 * seconds / whole:.1f} %",
        )
        for i, (name, seconds) in enumerate(parts)
    ]
    body = f'<div class="bar">{bar}</div>' + table(
        ("what the host did", "time", "share"), rows, numbers=(1, 2), stack=False
    )
    return PageSection("time", "Time", body + "".join(_device_time(run)) + _gaps(run))


def host_time(run: RunData) -> list[tuple[str, float]]:
    """Host phases from the run's time ledger, or from its rows if it has none."""
    ledger = _ledger(run, "host_seconds")
    if ledger:
        return sorted(
            ((_phase(name, run), seconds) for name, seconds in ledger.items() if name != "wall"),
            key=lambda pair: -pair[1],
        )
    steps = run.steps
    waiting = _total(steps.columns.get("data_seconds", ()))
    updates = max(0.0, _total(steps.columns.get("step_seconds", ())) - waiting)
    evaluating = sum(e.seconds for e in run.evaluations if math.isfinite(e.seconds))
    seconds = (event.data.get("seconds") for event in run.events if event.kind == EventKind.SAVE)
    saving = sum(float(value) for value in seconds if isinstance(value, int | float))
    rest = run.seconds - waiting - updates - evaluating - saving
    return [
        ("updates", updates),
        ("waiting for data", waiting),
        ("evaluation", evaluating),
        ("checkpoints", saving),
        ("start, end and the rest", max(0.0, rest)),
    ]


def _phase(name: str, run: RunData) -> str:
    if name == "launch" and str(run.extra.get("device", "")).startswith("cpu"):
        return "launch (on a CPU, the work itself)"
    return name


def _ledger(run: RunData, kind: str) -> dict[str, float]:
    """Amounts by phase of `time-ledger.json`, summed over the attempts; empty if missing."""
    total: dict[str, float] = {}
    for path in run.artifacts(TIME_LEDGER_NAME):
        try:
            stretches = json.loads(path.read_text("utf-8"))["stretches"]
            for stretch in stretches:
                for phase, amount in (stretch.get(kind) or {}).items():
                    total[str(phase)] = total.get(str(phase), 0.0) + float(amount)
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return {}
    return total


def _device_time(run: RunData) -> Iterator[str]:
    ledger = _ledger(run, "device_milliseconds")
    whole = sum(amount for name, amount in ledger.items() if name != "wall")
    if whole:
        rows = [
            (name, duration(amount / 1e3), f"{100 * amount / whole:.1f} %")
            for name, amount in ledger.items()
            if name != "wall"
        ]
        head = ("what the device did in sampled updates", "time", "share")
        yield table(head, rows, numbers=(1, 2), stack=False)


def _gaps(run: RunData) -> str:
    if len(run.stretches) < 2:
        return ""
    rows = [
        (f"attempt {i}", duration(s.seconds), s.devices)
        for i, s in enumerate(run.stretches, start=1)
    ]
    return table(("", "time", "devices"), rows, numbers=(1, 2), stack=False)


def _total(values: Sequence[float]) -> float:
    return sum(value for value in values if math.isfinite(value))


def memory_section(run: RunData) -> PageSection:
    """Memory use by kind during an update, and the measured peak."""
    peaks = [v for v in run.steps.columns.get("memory_bytes", ()) if math.isfinite(v)]
    held = run.extra.get("memory")
    table_of = {str(k): v for k, v in held.items()} if isinstance(held, Mapping) else {}
    rows: list[tuple[str, object]] = [
        (name.replace("_", " "), size(value)) for name, value in table_of.items()
    ]
    known = sum(float(v) for v in table_of.values() if isinstance(v, int | float))
    if peaks:
        on_cpu = str(run.extra.get("device", "cpu")).startswith("cpu")
        if rows and max(peaks) > known:
            what = "activations, batch" + (", the process itself" if on_cpu else ", workspace")
            rows.append((f"{what} (the rest of the peak)", size(max(peaks) - known)))
        peak = (
            "highest resident set of the process" if on_cpu else "highest allocated on the device"
        )
        rows.append((peak, tag("b", size(max(peaks)))))
    body = table(("", "bytes"), rows, numbers=(1,), stack=False) if rows else ""
    return PageSection(
        "memory",
        "Memory",
        body + "".join(_shortages(run)) or '<p class="soft">Nothing was measured.</p>',
    )


def _shortages(run: RunData) -> Iterator[str]:
    """The records of memory shortages."""
    for path in run.artifacts("out-of-memory*.json"):
        try:
            found = json.loads(path.read_text("utf-8"))
            tensors = [(t["name"], t["shape"], size(t["bytes"])) for t in found["largest_tensors"]]
            advice = [
                (i, a["do"], size(a["saves_bytes"]) if a["saves_bytes"] else "–")
                for i, a in enumerate(found["advice"], start=1)
            ]
            rows = [(name.replace("_", " "), size(b)) for name, b in found["table"].items()]
        except (OSError, ValueError, KeyError, TypeError):
            continue
        yield "<h3>Out of memory</h3>"
        yield table(("", "bytes"), rows, numbers=(1,), stack=False)
        yield table(
            ("", "what to try, in this order", "saves about"), advice, numbers=(2,), stack=False
        )
        yield details("Largest tensors", table(("tensor", "shape", "bytes"), tensors, numbers=(2,)))


def data_section(run: RunData) -> PageSection | None:
    """Samples as the model sees them, and their lengths; None if nothing was kept."""
    body = "".join(_data_sheets(run)) + "".join(_written_samples(run))
    return PageSection("data", "Data", body) if body else None


def _data_sheets(run: RunData) -> Iterator[str]:
    for path in run.artifacts(DATA_SHEET):
        try:
            sets = json.loads(path.read_text("utf-8"))["sets"]
        except (OSError, ValueError, KeyError, TypeError):
            continue
        for name, sheet in sets.items():
            count = sheet.get("samples")
            said = "" if count is None else f", {shown(count)} samples"
            yield f"<h3>{escape(name + said)}</h3>"
            yield from _sheet(sheet)


def _sheet(sheet: Mapping[str, Any]) -> Iterator[str]:
    if problem := sheet.get("problem"):
        yield tag("p", f"It could not be read: {problem}").text
    if bins := sheet.get("lengths"):
        yield _histogram(bins, str(sheet.get("length_unit", "items")))
    pictures, texts = [], []
    for sample in sheet.get("decoded", ()):
        if picture := sample.get("png"):
            data = base64.b64encode(base64.b64decode(picture)).decode()
            label = escape(sample.get("label", ""))
            pictures.append(
                f'<div><img alt="sample {escape(sample.get("id", ""))}" '
                f'src="data:image/png;base64,{data}">{label}</div>'
            )
        else:
            texts.append(sample)
    if pictures:
        yield f'<div class="samples">{"".join(pictures)}</div>'
    for sample in texts:
        yield tag("p", f"sample {sample.get('id', '')}", class_="note").text
        yield tag("pre", str(sample.get("text", "")), class_="wrap").text


def _histogram(bins: Sequence[Mapping[str, Any]], unit: str) -> str:
    highest = max((b["count"] for b in bins), default=0) or 1
    rows = []
    for b in bins:
        width = 100 * b["count"] / highest
        bar = tag(
            "span",
            style=f"display:block;height:12px;border-radius:2px;background:var(--c0);width:{width:.1f}%",
        )
        label = f"{b['from']:,}" if b["from"] == b["to"] else f"{b['from']:,} – {b['to']:,}"
        rows.append((label, f"{b['count']:,}", bar))
    shown_rows = table((unit, "count", ""), rows, numbers=(0, 1), stack=False)
    return f'<div class="histogram">{shown_rows}</div>'


def _written_samples(run: RunData) -> Iterator[str]:
    """Text generated by a language model at the end."""
    for path in run.artifacts("sample.txt"):
        yield "<h3>Text generated by the trained model</h3>"
        yield tag("pre", path.read_text("utf-8", "replace")[:8000], class_="wrap").text
