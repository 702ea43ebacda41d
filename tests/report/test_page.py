"""The page of a run: self-contained, small, safe, and whole whatever became of the run."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from judge.folders import BUDGET, CONTRACT, finished, make_folder
from report.browser import CHROMIUM, load
from surefoot.core.reports import Event
from surefoot.judge.compare import compare_runs
from surefoot.observe.readers.run_data import read_run
from surefoot.report.comparison import write_comparison
from surefoot.report.run_page import write_page
from surefoot.report.series import MAX_POINTS, page_data

MOST_BYTES = 2 * 1024 * 1024
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="no chromium here")
START = Event("start", 0, "started", {"devices": 1}, 1000.0)
EVIL = "</script><script>window.x=1</script><img src=http://e.example/x onerror=alert(1)>"


def page_of(path: Path) -> str:
    return write_page(read_run(path)).read_text("utf-8")


def assert_self_contained(text: str) -> None:
    assert len(text.encode()) < MOST_BYTES
    assert not re.search(r"""<\w[^>]*\s(?:src|href)=["']?(?:https?:)?//""", text)
    assert not re.search(r"url\(|@import|<link[^>]+stylesheet", text)
    assert text.count("<script>") == 1  # The page's own, whose digest the policy names.


def curves_in(text: str) -> dict:  # type: ignore[type-arg]
    found = re.search(r'id="curves-data">(.*?)</script>', text, re.DOTALL)
    assert found
    return json.loads(found[1])  # type: ignore[no-any-return]


def test_it_opens_with_the_verdict_and_holds_every_part(tmp_path: Path) -> None:
    contract = {**CONTRACT, "target": 0.95, "budget": {**BUDGET, "wall_clock": "2 h"}}
    path = make_folder(tmp_path / "run", contract=contract)
    text = page_of(path)
    assert_self_contained(text)
    assert text.index("The contract is broken: target") < text.index('id="curves"')
    for part in ("curves", "slices", "subject", "time", "config", "environment", "resume"):
        assert f'<section id="{part}">' in text
    assert [chart["id"] for chart in curves_in(text)["charts"]][:2] == ["loss", "metric-accuracy"]
    assert (path / "report.html").is_file()


@pytest.mark.parametrize("kind", ["finished", "stopped", "failure", "killed"])
def test_it_says_what_is_there_of_a_run_that_ended_in_any_way(tmp_path: Path, kind: str) -> None:
    data = {"traceback": "Traceback: deep inside", "remedy": "do this"}
    end = [] if kind == "killed" else [Event(kind, 2, "because", data, 2000.0)]
    text = page_of(make_folder(tmp_path / "run", contract=None, events=[START, *end]))
    assert {"failure": "failed"}.get(kind, kind) in text
    assert ("deep inside" in text) is (kind == "failure")
    assert ("--resume" in text) is False  # There is no checkpoint to resume from.


def test_a_folder_that_holds_next_to_nothing_makes_a_page(tmp_path: Path) -> None:
    path = tmp_path / "run"
    path.mkdir()
    (path / "config.yaml").write_text("name: x\n")
    text = page_of(path)
    assert "No update has been logged yet." in text
    assert "record.json is missing" in text


def test_damaged_files_are_said(tmp_path: Path) -> None:
    path = make_folder(tmp_path / "run")
    (path / "record.json").write_text("{oops")
    with open(path / "metrics.jsonl", "ab") as file:
        file.write(b'{"row":"step"}\nnonsense\n{"row":"st')
    (path / "artifacts" / "data-sheet.json").write_text("[]")
    (path / "artifacts" / "time-ledger.json").write_text('{"stretches": [3]}')
    (path / "artifacts" / "out-of-memory.json").write_text("{}")
    assert "record.json cannot be read" in page_of(path)


def test_what_a_run_recorded_is_never_markup(tmp_path: Path) -> None:
    config = {"name": "x", "seed": 0, "data": {"path": EVIL}}
    events = [START, Event("note", 1, EVIL, {}, 1500.0), Event("spike", 1, EVIL, {}, 1500.0)]
    record = {"data": {"fingerprints": {EVIL: EVIL}}, "git": {"commit": None, "reason": EVIL}}
    path = make_folder(
        tmp_path / "run",
        config=config,
        events=[*events, finished(3)],
        record=record,
        evaluations=[{f"{EVIL}x/accuracy": 0.5}],
    )
    decoded = [{"id": 0, "text": EVIL, "label": EVIL}]
    sheet = {"sets": {EVIL: {"samples": 1, "decoded": decoded, "length_unit": EVIL}}}
    (path / "artifacts" / "data-sheet.json").write_text(json.dumps(sheet))
    (path / "artifacts" / "sample.txt").write_text(EVIL)
    text = page_of(path)
    assert EVIL not in text
    assert_self_contained(text)


def test_a_long_run_keeps_its_spikes_and_stays_small(tmp_path: Path) -> None:
    losses = [1.0] * 30_000
    losses[12_345] = 777.0
    losses[20_000] = float("nan")
    path = make_folder(tmp_path / "run", losses=losses)
    text = page_of(path)
    assert_self_contained(text)
    data = curves_in(text)
    (train,) = [s for s in data["charts"][0]["series"] if s["label"] == "train"]
    assert len(train["y"]) <= MAX_POINTS
    assert max(value for value in train["hi"] if value is not None) == 777.0
    assert [m for m in data["runs"][0]["marks"] if m["text"] == "loss is not finite"]


def test_values_that_few_rows_have_stand_on_a_grid_of_their_own(tmp_path: Path) -> None:
    path = make_folder(tmp_path / "run", losses=[1.0] * 10)
    rows = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        row["weight_norm"] = 5.0 if row.get("step") in (4, 8) and row["row"] == "step" else None
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = page_data([read_run(path)], [""], [[]])
    (chart,) = [chart for chart in data["charts"] if chart["id"] == "weight_norm"]
    (series,) = chart["series"]
    assert series["y"] == [5, 5]
    assert data["grids"][series["grid"]]["step"] == [4, 8]


def test_time_at_work_leaves_out_the_time_between_attempts(tmp_path: Path) -> None:
    events = [
        Event("start", 0, "", {}, 1000.0),
        Event("stopped", 1, "", {}, 1001.0),
        Event("resume", 1, "", {}, 1001.5),
        finished(3, 1004.0),
    ]
    path = make_folder(tmp_path / "run", events=events)  # Rows at 1001, 1002 and 1003.
    data = page_data([read_run(path)], [""], [[{"step": 1, "time": 1001.5, "text": "resume"}]])
    assert data["grids"][0]["time"] == [1, 1.5, 2.5]
    assert data["runs"][0]["marks"][0]["time"] == 1


@needs_browser
@pytest.mark.parametrize("width", [1280, 390])
def test_a_browser_draws_it_asks_for_nothing_and_complains_of_nothing(
    tmp_path: Path, width: int
) -> None:
    path = make_folder(tmp_path / "run", losses=[3.0 / n for n in range(1, 200)])
    seen = load(write_page(read_run(path)), width)
    assert seen.console == ""
    assert seen.requests == ()
    if width > 500:
        assert seen.dom.count("<figure") >= 5
        assert re.search(r'<path d="M[\d.]+ [\d.]+L', seen.dom)


@needs_browser
def test_a_browser_draws_a_comparison(tmp_path: Path) -> None:
    runs = [read_run(make_folder(tmp_path / name)) for name in "ab"]
    page = write_comparison(runs, compare_runs(runs), tmp_path / "both.html")
    assert_self_contained(page.read_text("utf-8"))
    seen = load(page)
    assert (seen.console, seen.requests) == ("", ())
    assert "A train" in seen.dom and "B train" in seen.dom


@needs_browser
def test_the_browser_would_have_told(tmp_path: Path) -> None:
    page = tmp_path / "bad.html"
    page.write_text('<img src="http://e.example/x.png"><script>console.error("oh")</script>')
    seen = load(page)
    assert "oh" in seen.console
    assert seen.requests == ("http://e.example/x.png",)
