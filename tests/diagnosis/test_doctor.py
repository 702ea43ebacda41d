"""The doctor on real trainings: each fault is named first, and a healthy run is called so.

All faults, problems and seeds are scored by `make doctor-score`; here is one of each.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from diagnosis.healthy_runs import KINDS, healthy
from diagnosis.problems import PROBLEMS
from diagnosis.sick_runs import FAULTS, problems_of, sick
from surefoot.core.finding import Finding
from surefoot.core.reports import Event
from surefoot.diagnosis.causes import all_causes
from surefoot.diagnosis.doctor import Diagnosis, examine
from surefoot.diagnosis.readers import read_recording
from surefoot.diagnosis.recording import RecordingBuilder

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def diagnosed(path: Path) -> Diagnosis:
    return examine(read_recording(path))


def slugs(findings: tuple[Finding, ...]) -> list[str]:
    return [finding.slug for finding in findings]


@pytest.mark.parametrize("slug", FAULTS)
def test_each_fault_is_named_first(slug: str, tmp_path: Path) -> None:
    problem = problems_of(slug)[0]
    path = sick(slug, problem, seed=0).write(tmp_path / "log.jsonl")
    found = diagnosed(path)
    assert slugs(found.findings)[:1] == [slug]
    first = found.findings[0]
    assert first.evidence
    assert first.fix
    assert any(letter.isdigit() for letter in first.message)
    assert not found.is_healthy


@pytest.mark.parametrize("kind", ["usual", "constant_rate", "with_momentum", "short"])
@pytest.mark.parametrize("problem", ["mlp", "cnn"])
def test_a_healthy_run_gets_no_finding(kind: str, problem: str, tmp_path: Path) -> None:
    found = diagnosed(healthy(kind, problem, seed=3).write(tmp_path / "log.jsonl"))
    assert found.is_healthy
    assert found.findings == found.consequences == ()
    # What it cannot tell is said, and so is what it would need.
    missing = {entry.missing for entry in found.undetermined}
    assert {"device_utilization", "grad_norm/NAME"} <= missing
    assert not found.left_out


def test_a_healthy_language_model_gets_no_finding(tmp_path: Path) -> None:
    assert diagnosed(healthy("usual", "gpt", seed=4).write(tmp_path / "log.jsonl")).is_healthy


def test_with_the_loss_alone_it_says_what_it_cannot_tell(tmp_path: Path) -> None:
    log = tmp_path / "log.csv"
    log.write_text("loss\n" + "".join(f"{2 / (1 + n / 20):.4f}\n" for n in range(100)))
    found = diagnosed(log)
    assert found.is_healthy
    missing = {u.missing: u.slugs for u in found.undetermined}
    assert "overfitting" in missing["validation loss"]
    assert "vanishing-gradients" in missing["grad_norm"]


def test_scale_of_the_loss_does_not_matter(tmp_path: Path) -> None:
    """Thresholds are relative: a loss in other units gets the same findings."""
    for slug in ("rate-too-high-late", "bad-batch", "overfitting", "labels-unrelated"):
        log = sick(slug, "mlp", seed=0)
        for row in log.rows:
            if row["row"] == "step":
                row["loss"] *= 1000
                row["grad_norm"] *= 1000
            else:
                row["metrics"]["loss"] *= 1000
        assert slugs(diagnosed(log.write(tmp_path / "log.jsonl")).findings)[:1] == [slug]


def test_any_log_is_read_without_an_error() -> None:
    for seed in range(250):
        _read_a_made_up_log(np.random.default_rng(seed))


def _read_a_made_up_log(random: np.random.Generator) -> None:
    """Short, empty, constant, huge or broken columns, in any mixture."""
    builder = RecordingBuilder("log", "made up")
    names = ["loss", "lr", "grad_norm", "weight_norm", "loss_scale", "weight", "epoch", "tokens"]
    names += ["val_loss", "val_accuracy", "step_seconds", "data_seconds", "memory_bytes", "applied"]
    names += ["grad_norm/a", "grad_norm/b", "device_utilization"]
    kinds = (
        lambda n: 0.0,
        lambda n: 1.0,
        lambda n: float(random.normal()),
        lambda n: float(n),
        lambda n: -float(n),
        lambda n: float(np.exp(random.normal() * 5)),
        lambda n: float(random.choice([np.nan, np.inf, -np.inf, 1.0, 2.0])),
        lambda n: float("nan"),
    )
    chosen = {name: kinds[random.integers(len(kinds))] for name in names if random.random() < 0.7}
    for n in range(int(random.choice([0, 1, 2, 3, 7, 12, 40, 200]))):
        row = {name: make(n) for name, make in chosen.items() if random.random() < 0.9}
        builder.add({"step": n if random.random() < 0.98 else n // 2, **row})
    if random.random() < 0.5:
        builder.events.append(Event("resume", 5, "resumed"))
    with np.errstate(all="raise", under="ignore"):
        diagnosis = examine(builder.build())
    assert not diagnosis.left_out
    for finding in (*diagnosis.findings, *diagnosis.consequences):
        assert "nan" not in finding.message.lower().replace("is nan", "").replace("into nan", "")
        json.dumps(finding.as_json())


def test_every_cause_is_explained_and_has_a_bad_run() -> None:
    infos = [cause.info for cause in all_causes()]
    assert {info.slug for info in infos} == set(FAULTS)
    assert len({info.code for info in infos}) == len(infos)
    for info in infos:
        assert info.code.startswith("SFD")
        assert info.family
        assert set(info.explains) <= set(FAULTS) - {info.slug}
        for text in (info.title, info.observes, info.why, info.fix, info.source):
            assert len(text) > 15


def test_the_page_lists_every_cause_in_its_own_words() -> None:
    page = (DOCS / "doctor-causes.md").read_text(encoding="utf-8")
    for cause in all_causes():
        info, needs = cause.info, ", ".join(need.name for need in cause.needs)
        row = f"| `{info.slug}` | {info.code} | {info.title} {info.observes} | {needs} |"
        assert row in page, f"docs/doctor-causes.md wants the line\n{row}"


def test_the_problems_are_three() -> None:
    assert set(PROBLEMS) == {"mlp", "cnn", "gpt"}
    assert len(KINDS) * len(PROBLEMS) >= 15


def test_what_another_finding_explains_stands_below_it(tmp_path: Path) -> None:
    """A rate that climbs to the end and is tiny: the climb is the cause."""
    lines = ["step,loss,lr"]
    lines += [f"{n},{2.3 - 1e-5 * n:.6f},{1e-7 * (n + 1):.3g}" for n in range(200)]
    log = tmp_path / "log.csv"
    log.write_text("\n".join(lines))
    found = diagnosed(log)
    assert slugs(found.findings) == ["warmup-too-long"]
    assert slugs(found.consequences) == ["rate-too-low"]


def test_a_broken_sample_is_named(tmp_path: Path) -> None:
    """Of windows that broke, with others in order between them, the sample that all share."""
    rows = []
    for n in range(60):
        ids = [n % 7, 10 + n % 5, 20 + n % 3]
        loss = float("nan") if 13 in ids else 2.0 - n / 100
        rows.append({"step": n + 1, "loss": loss, "sample_ids": ids, "applied": 13 not in ids})
    log = tmp_path / "log.jsonl"
    log.write_text("\n".join(json.dumps(row) for row in rows))
    first = diagnosed(log).findings[0]
    assert first.slug == "non-finite-data"
    assert first.evidence["shared_samples"] == [13]
    assert "sample 13" in first.message
