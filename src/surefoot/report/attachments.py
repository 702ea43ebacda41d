"""The lower part of a run's page: configuration, environment, history, resuming, files."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from surefoot.config.load import Difference, differences
from surefoot.judge.differences import flat
from surefoot.observe.readers.run_data import RunData
from surefoot.observe.readers.runs import RunStatus
from surefoot.report.markup import PageSection, details, escape, moment, size, table, tag
from surefoot.state.checkpoint import list_checkpoints

NAMED_PACKAGES = ("surefoot", "torch", "numpy", "tokenizers", "transformers", "scikit-learn")
MAX_EVENTS = 400
MAX_DIFF_CHARACTERS = 60_000


def config_section(run: RunData, baseline: RunData | None) -> PageSection:
    """Each value with its origin, and the differences from a baseline."""
    if not run.config:
        return PageSection(
            "config", "Configuration", '<p class="soft">The run ended before it wrote one.</p>'
        )
    rows = [(path, value, run.origins.get(path, "")) for path, value in flat(run.config)]
    chosen = [row for row in rows if row[2] != "default"]
    body = ""
    if baseline is not None:
        body += f"<h3>Differences from {escape(baseline.name)}</h3>" + difference_table(
            differences(baseline.config, run.config)
        )
    body += "<h3>Chosen</h3>" + _config_table(chosen)
    defaults = [row for row in rows if row[2] == "default"]
    if defaults:
        body += details(f"{len(defaults)} values left at their default", _config_table(defaults))
    return PageSection("config", "Configuration", body)


def difference_table(changes: list[Difference]) -> str:
    """The differences between two configurations."""
    if not changes:
        return '<p class="soft">None.</p>'
    rows = [(change.path, _value(change.before), _value(change.after)) for change in changes]
    return table(("key", "before", "now"), rows, kinds="path")


def _config_table(rows: list[tuple[str, Any, str]]) -> str:
    shown = [(path, tag("code", _value(value)), origin) for path, value, origin in rows]
    return table(("key", "value", "from"), shown, kinds="path")


def _value(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return "" if value is None else str(value)


def environment_section(run: RunData) -> PageSection:
    """Code, packages, machine."""
    record = run.record
    if not record:
        nothing = '<p class="soft">Nothing was recorded.</p>'
        return PageSection("environment", "Environment", nothing)
    rows = [
        ("Code", _code(_of(record, "git"))),
        ("Command", tag("code", shlex.join(map(str, record.get("command_line", ()))))),
        ("Folder", tag("code", record.get("working_directory", ""))),
        (
            "Python",
            ", ".join(
                str(_of(record, name).get(key, ""))
                for name, key in (("python", "version"), ("system", "platform"))
            ),
        ),
        ("Packages", _packages(_of(record, "packages"))),
        ("Machine", _machine(record)),
        ("Container", " ".join(str(v) for v in _of(record, "container").values())),
    ]
    body = table((), [row for row in rows if row[1]], kinds="k")
    body += details(
        "Torch switches, environment variables, all packages",
        "".join(
            table((), [(k, tag("code", v)) for k, v in _of(record, name).items()], kinds="path")
            for name in ("torch", "environment", "packages")
        ),
    )
    return PageSection("environment", "Environment", body + "".join(_uncommitted(run)))


def _uncommitted(run: RunData) -> Iterator[str]:
    for path in run.artifacts("uncommitted*.diff"):
        text = path.read_text("utf-8", "replace")
        cut = (
            ""
            if len(text) <= MAX_DIFF_CHARACTERS
            else "\n[truncated; the full diff is in the file]"
        )
        shown = tag("pre", text[:MAX_DIFF_CHARACTERS] + cut).text
        yield details(f"Uncommitted changes: {path.name}, {size(len(text))}", shown)


def _code(git: Mapping[str, Any]) -> str:
    if not git.get("commit"):
        return f"commit unknown: {git.get('reason', '')}"
    state = f"{git['diff_bytes']:,} bytes of uncommitted changes" if git.get("dirty") else "clean"
    return f"commit {git['commit']} on {git.get('branch') or 'no branch'}, {state}"


def _packages(packages: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {packages[name]}" for name in NAMED_PACKAGES if name in packages)


def _machine(record: Mapping[str, Any]) -> str:
    hardware = _of(record, "hardware")
    cpu, memory = _of(hardware, "cpu"), _of(hardware, "memory")
    parts = [f"{cpu.get('name', 'CPU')}, {cpu.get('usable_cores', '?')} cores"]
    parts.append(size(memory.get("total_bytes")))
    gpus = hardware.get("gpus")
    parts += [
        f"{gpu.get('name')} {size(gpu.get('memory_bytes'))}"
        for gpu in (gpus if isinstance(gpus, list) else ())
    ]
    return ", ".join(parts) + f" ({_of(record, 'system').get('host', '')})"


def _of(record: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = record.get(name)
    return found if isinstance(found, Mapping) else {}


def history_section(run: RunData) -> PageSection:
    """All events, in order."""
    kept = run.events[-MAX_EVENTS:]
    rows = [(e.kind, f"{e.step:,}", moment(e.time), e.message) for e in kept]
    body = table(("event", "update", "when", ""), rows, numbers=(1,)) if rows else ""
    if len(kept) < len(run.events):
        body = f'<p class="note">The last {MAX_EVENTS} of {len(run.events):,} events.</p>' + body
    return PageSection("events", "Events", body or '<p class="soft">No events are recorded.</p>')


def resume_section(run: RunData) -> PageSection:
    """How to resume the run, and its files."""
    found = (
        list_checkpoints(run.path / "checkpoints") if (run.path / "checkpoints").is_dir() else []
    )
    resumable = run.summary.status in (RunStatus.STOPPED, RunStatus.KILLED, RunStatus.FAILED)
    lines = []
    if resumable and found:
        lines.append((f"surefoot train --resume {run.path}", f"resumes from {found[-1].name}"))
    if found:
        lines.append(
            (f"surefoot checkpoint inspect {run.path}", "what it holds, and whether it is complete")
        )
        lines.append((f'surefoot.load("{run.path}").model', "the model, in Python"))
    lines.append((f"surefoot compare {run.path} OTHER", "compare with another run"))
    rows = [(tag("code", command), purpose) for command, purpose in lines]
    body = table((), rows)
    if found:
        body += table(
            ("checkpoint", "bytes"),
            [(p.name, size(_bytes_in(p))) for p in found],
            numbers=(1,),
            stack=False,
        )
    else:
        body += '<p class="soft">There are no checkpoints.</p>'
    files = [p for p in sorted(run.path.iterdir()) if p.is_file() and not p.name.startswith(".")]
    files += run.artifacts("*")
    listed = [(str(p.relative_to(run.path)), size(p.stat().st_size)) for p in files if p.is_file()]
    body += details(
        "Files of the run folder", table(("file", "bytes"), listed, numbers=(1,), stack=False)
    )
    if run.problems:
        body += table(("What could not be read",), [(problem,) for problem in run.problems])
    return PageSection("resume", "Resuming", body)


def _bytes_in(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
