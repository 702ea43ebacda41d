"""The page of one run: the verdict first, then everything another engineer needs.

Also for running, failed and killed runs: shows whatever exists.
"""

from __future__ import annotations

from pathlib import Path

from surefoot.core.errors import SurefootError
from surefoot.diagnosis.doctor import Diagnosis, examine
from surefoot.diagnosis.readers import read_recording
from surefoot.judge.contract import verdict_on
from surefoot.observe.files.atomic import atomic_write
from surefoot.observe.readers.run_data import RunData, read_run
from surefoot.observe.run_folder import REPORT_NAME
from surefoot.report import attachments, measurements, overview
from surefoot.report.markup import PageSection
from surefoot.report.page import curves_body, page
from surefoot.report.series import page_data


def write_page(
    run: RunData, *, baseline: str | Path | None = None, out: Path | None = None
) -> Path:
    """Writes the page of a run into its folder, or to `out`; returns its path.

    Args:
        baseline: the run to compare the configuration with; default: the baseline of the contract,
            if it can be read.

    Raises:
        RunFolderError: the baseline is not a run folder.
    """
    target = run.path / REPORT_NAME if out is None else out
    other = read_run(baseline) if baseline is not None else _contracted_baseline(run)
    atomic_write(target, page_of(run, other))
    return target


def page_of(run: RunData, baseline: RunData | None = None) -> str:
    """The page of a run as HTML."""
    verdict = verdict_on(run)
    diagnosis = _diagnosis(run)
    findings = () if diagnosis is None else diagnosis.findings
    curves = page_data([run], [""], [overview.marks_of(run, findings)])
    sections: list[PageSection | None] = [
        None if diagnosis is None else overview.findings_section(findings, diagnosis.consequences),
        PageSection("curves", "Curves", curves_body(curves)),
        measurements.slices_section(run, verdict),
        overview.subject_section(run),
        measurements.time_section(run),
        measurements.memory_section(run),
        measurements.data_section(run),
        attachments.config_section(run, baseline),
        attachments.environment_section(run),
        attachments.history_section(run),
        attachments.resume_section(run),
    ]
    kept = [section for section in sections if section is not None]
    return page(f"{run.name} · Surefoot", overview.head(run, verdict), kept, curves)


def _diagnosis(run: RunData) -> Diagnosis | None:
    """The doctor's findings; None if too little is recorded."""
    try:
        diagnosis = examine(read_recording(run.path))
    except SurefootError:
        return None
    return None if diagnosis.is_too_short and diagnosis.is_healthy else diagnosis


def _contracted_baseline(run: RunData) -> RunData | None:
    baseline = run.contract.get("baseline")
    if not isinstance(baseline, dict) or not baseline.get("run"):
        return None
    try:
        return read_run(str(baseline["run"]))
    except SurefootError:
        return None
