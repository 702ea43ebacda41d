"""The upper part of a run's page: verdict, headline figures, findings, model, data and task."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from surefoot.core.finding import Finding
from surefoot.judge.verdict import ContractVerdict, Standing
from surefoot.observe.events import EventKind
from surefoot.observe.formatting import format_count
from surefoot.observe.readers.run_data import RunData
from surefoot.observe.readers.runs import RunStatus
from surefoot.report.markup import (
    Markup,
    PageSection,
    chip,
    details,
    duration,
    escape,
    facts,
    moment,
    table,
    tag,
)
from surefoot.report.markup import number as shown

LEVEL_OF_STATUS = {
    RunStatus.FINISHED: "good",
    RunStatus.FAILED: "bad",
    RunStatus.KILLED: "warn",
    RunStatus.STOPPED: "warn",
    RunStatus.RUNNING: "",
}
LEVEL_OF_STANDING = {Standing.HELD: "good", Standing.BROKEN: "bad", Standing.NOT_SHOWN: "warn"}
SHOWN_EVENTS = {
    EventKind.FAILURE: "bad",
    EventKind.SPIKE: "warn",
    EventKind.SKIP: "warn",
    EventKind.ROLL_BACK: "warn",
    EventKind.SAVE_PAUSED: "bad",
    EventKind.BUDGET: "warn",
    EventKind.RESUME: "",
    EventKind.EARLY_STOP: "",
    EventKind.STOPPED: "warn",
    EventKind.OBSERVER_FAILED: "warn",
    "plateau": "",
}
MAX_MARKS = 200
MAX_TRACE_CHARACTERS = 40_000


def marks_of(run: RunData, findings: Sequence[Finding]) -> list[dict[str, Any]]:
    """Marks on the time axis: events, findings, non-finite values."""
    marks: list[dict[str, Any]] = [
        {
            "step": event.step,
            "time": event.time,
            "level": SHOWN_EVENTS[event.kind],
            "text": f"{event.kind}: {event.message}",
        }
        for event in run.events
        if event.kind in SHOWN_EVENTS
    ]
    for finding in findings:
        for step in _steps_of(finding.evidence):
            level = "bad" if finding.severity.value == "error" else "warn"
            marks.append({"step": step, "level": level, "text": f"{finding.code} {finding.slug}"})
    steps = run.steps.column("step")
    for name, rows in run.steps.non_finite.items():
        if name in ("loss", "grad_norm"):
            text = f"{name} is not finite"
            marks += [{"step": steps[row], "level": "bad", "text": text} for row in rows]
    return marks[:MAX_MARKS]


def _steps_of(evidence: Mapping[str, object]) -> Iterator[int]:
    """The updates that a finding refers to."""
    for key, value in evidence.items():
        if key.endswith("step") and isinstance(value, int) and not isinstance(value, bool):
            yield value
        elif key.endswith("steps") and isinstance(value, list | tuple):
            yield from (int(v) for v in value[:8] if isinstance(v, int | float))


def head(run: RunData, verdict: ContractVerdict | None) -> str:
    """Name, status, verdict and headline figures."""
    summary = run.summary
    name = str(run.config.get("name") or run.record.get("name") or run.name)
    status = chip(summary.status.value, LEVEL_OF_STATUS[summary.status])
    began = f", begun {moment(run.stretches[0].began)}" if run.stretches else ""
    return (
        tag("p", f"Run {run.name}{began}", class_="eyebrow").text
        + tag("h1", name, " ", status).text
        + _claim(run, verdict)
        + facts(_headline(run))
    )


def _claim(run: RunData, verdict: ContractVerdict | None) -> str:
    if verdict is not None:
        level = LEVEL_OF_STANDING[verdict.standing]
        claim = tag("p", verdict.claim[0].upper() + verdict.claim[1:] + ".", class_="claim")
        return f'<div class="verdict {level}">{claim.text}{clauses(verdict)}{_ending(run)}</div>'
    level = LEVEL_OF_STATUS[run.summary.status]
    claim = tag("p", _outcome(run), class_="claim")
    note = tag("p", "The run has no contract, so there is no verdict.", class_="note")
    return f'<div class="verdict {level}">{claim.text}{_ending(run)}{note.text}</div>'


def clauses(verdict: ContractVerdict) -> str:
    """One row per clause of a verdict."""
    rows = []
    for clause in verdict.clauses:
        found: object = clause.found
        if clause.remedy:
            found = Markup(
                f"{escape(clause.found)}<br>{tag('span', clause.remedy, class_='soft').text}"
            )
        standing = chip(clause.standing.value, LEVEL_OF_STANDING[clause.standing])
        rows.append((clause.name, standing, clause.promised, found))
    return table(("clause", "", "promised", "found"), rows, kinds="name")


def _outcome(run: RunData) -> str:
    step = "" if run.summary.step is None else f" at update {run.summary.step:,}"
    return {
        RunStatus.FINISHED: f"Finished{step}.",
        RunStatus.FAILED: f"Failed{step}.",
        RunStatus.STOPPED: f"Stopped{step}; it can be resumed.",
        RunStatus.KILLED: f"Its process was killed{step}; it can be resumed.",
        RunStatus.RUNNING: f"Still running{step}.",
    }[run.summary.status]


def _ending(run: RunData) -> str:
    """How the last attempt ended, with the traceback of a failure."""
    failure = next((e for e in reversed(run.events) if e.kind == EventKind.FAILURE), None)
    if run.summary.status is not RunStatus.FAILED or failure is None:
        return tag("p", run.summary.note, class_="note").text if run.summary.note else ""
    said = [
        f"<p><b>{label}</b> {escape(failure.data[key])}</p>"
        for key, label in (("where", "Where"), ("rule", "Rule"), ("remedy", "Do"))
        if failure.data.get(key)
    ]
    trace = str(failure.data.get("traceback", ""))[-MAX_TRACE_CHARACTERS:]
    return (
        tag("p", failure.message).text
        + "".join(said)
        + details("Traceback", tag("pre", trace).text)
    )


def _headline(run: RunData) -> Iterator[tuple[str, object, object]]:
    summary, steps = run.summary, run.steps
    best = summary.best
    if best is not None:
        where = f"{best.set_name}, update {best.step:,}"
        yield f"Best {best.metric}", shown(best.value), where
    if summary.loss is not None:
        yield "Training loss", shown(summary.loss), "of the last update"
    if summary.step is not None:
        horizon = run.extra.get("horizon_updates")
        yield "Updates", f"{summary.step:,}", f"of {horizon:,}" if isinstance(horizon, int) else ""
    for name in ("tokens", "samples"):
        if count := steps.last(name):
            yield name.capitalize(), format_count(count), ""
            break
    if run.stretches:
        attempts = len(run.stretches)
        resumed = f"in {attempts} attempts" if attempts > 1 else ""
        yield "Run time", duration(run.seconds), resumed
        yield "Device-hours", f"{run.device_hours:.4g}", str(run.extra.get("device", ""))


def findings_section(findings: Sequence[Finding], consequences: Sequence[Finding]) -> PageSection:
    """Findings of the doctor in the recorded signals."""
    if not findings:
        body = '<p class="soft">No problem was found in the recorded signals.</p>'
        return PageSection("findings", "Findings", body)
    body = "".join(_finding(finding) for finding in findings)
    if consequences:
        named = ", ".join(f"{f.slug} ({f.code})" for f in consequences)
        body += tag("p", f"Also seen, and explained by the above: {named}.", class_="note").text
    return PageSection("findings", "Findings", body)


def _finding(finding: Finding) -> str:
    title = f"{finding.slug.replace('-', ' ')} "
    level = {"error": "bad", "warning": "warn"}.get(finding.severity.value, "")
    return tag(
        "div",
        tag(
            "p",
            title,
            chip(f"{finding.severity.value}, {finding.certainty.value}", level),
            class_="head",
        ),
        tag("p", finding.message),
        tag("p", Markup("<b>Try</b> "), finding.fix, class_="soft"),
        class_=f"finding {finding.severity.value}",
    ).text


def subject_section(run: RunData) -> PageSection:
    """Model, data and task, in sentences and a table."""
    extra, data = run.extra, run.record.get("data")
    rows: list[tuple[str, object]] = [
        ("Model", _model(run)),
        ("Data", _data(run, data if isinstance(data, Mapping) else {})),
        ("Task", _join(_section(run, "task"))),
        ("Optimizer", _optimizer(run)),
        ("Update", _update(run)),
        ("Precision", _reasoned(extra.get("precision"))),
        ("Device", extra.get("device", "")),
        ("Seed", run.record.get("seed", "")),
        ("Exactness", _exactness(extra.get("exactness"))),
    ]
    return PageSection(
        "subject", "What was trained", table((), [r for r in rows if r[1] != ""], kinds="k")
    )


def _section(run: RunData, name: str) -> Mapping[str, Any]:
    found = run.config.get(name)
    return found if isinstance(found, Mapping) else {}


def _join(values: Mapping[str, Any], leave: Iterable[str] = ()) -> str:
    kind = str(values.get("kind", ""))
    rest = [f"{key} {value}" for key, value in values.items() if key not in ("kind", *leave)]
    return ", ".join(part for part in (kind, *rest) if part)


def _model(run: RunData) -> str:
    count = run.extra.get("parameters")
    trained = run.extra.get("trainable_parameters")
    said = f"{count:,} parameters" if isinstance(count, int) else ""
    if isinstance(trained, int) and trained != count:
        said += f", {trained:,} of them trained"
    section = _section(run, "model")
    kind = str(section.get("target", section.get("kind", "")))
    sizes = [
        f"{key} {value}"
        for key, value in section.items()
        if not isinstance(value, bool | str) and value not in ([], 0.0) and key != "norm_epsilon"
    ]
    return "; ".join(part for part in (kind, said, ", ".join(sizes)) if part)


def _data(run: RunData, recorded: Mapping[str, Any]) -> str:
    section = _section(run, "data")
    parts = [str(section.get("target", section.get("kind", "")))]
    for name, value in recorded.items():
        if isinstance(value, Mapping) and name != "fingerprints":
            counts = [f"{v:,} {k}" for k, v in value.items() if isinstance(v, int)]
            parts.append(f"{name}: {', '.join(counts)}")
    prints = recorded.get("fingerprints")
    if isinstance(prints, Mapping):
        parts.append("fingerprints " + ", ".join(f"{n} {str(p)[:20]}" for n, p in prints.items()))
    return "; ".join(part for part in parts if part)


def _optimizer(run: RunData) -> str:
    schedule = _join(_section(run, "schedule"))
    kernel = run.extra.get("optimizer_kernel")
    optimizer = _join(
        _section(run, "optimizer"), ("groups", "decay_rule", "decay_embeddings", "fused")
    )
    parts = (optimizer, f"schedule {schedule}" if schedule else "", str(kernel or ""))
    return "; ".join(part for part in parts if part)


def _update(run: RunData) -> str:
    samples, tokens = run.extra.get("samples_per_update"), run.extra.get("tokens_per_sample")
    said = f"{samples} samples" if samples else ""
    if samples and tokens:
        said += f", {float(samples) * float(tokens):,.0f} tokens"
    train = _section(run, "train")
    rest = [
        f"{key} {train[key]}"
        for key in ("micro_batch", "accumulation", "clip_norm", "horizon")
        if key in train
    ]
    return "; ".join(part for part in (said, ", ".join(rest)) if part)


def _reasoned(value: object) -> str:
    if not isinstance(value, Mapping):
        return ""
    return f"{value.get('name', '')} ({value.get('reason', '')})"


def _counted_kinds(modules: Sequence[object]) -> list[str]:
    """Module descriptions `NAME: KIND, REASON` counted as `COUNT x KIND, REASON`."""
    kinds = [str(module).partition(": ")[2] or str(module) for module in modules]
    return [f"{kinds.count(kind)} x {kind}" for kind in dict.fromkeys(kinds)]


def _exactness(value: object) -> str:
    if not isinstance(value, Mapping):
        return ""
    split = _counted_kinds(value.get("depends_on_the_split") or [])
    said = (
        "independent of the split into micro-batches and ranks"
        if not split
        else ("depends on the split by " + "; ".join(map(str, split)))
    )
    return f"{said}; data order: {value.get('data_order', '')}"
