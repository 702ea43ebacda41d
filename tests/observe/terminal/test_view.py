"""The view: right numbers, from the latest reports only; and its look at several widths."""

from __future__ import annotations

import dataclasses
import io
import math
import xml.etree.ElementTree as ElementTree
from itertools import pairwise

import pytest
from rich.console import Console

from observe.samples import EVALUATION, report
from surefoot.core.reports import Event
from surefoot.observe.terminal.braille import Axes, braille_dots, braille_lines, sparkline
from surefoot.observe.terminal.frame import (
    plain_eval_line,
    plain_event_line,
    plain_step_line,
    render_frame,
)
from surefoot.observe.terminal.picture import frame_as_svg
from surefoot.observe.terminal.view import RunFacts, ThinnedCurve, Tracker, Unit, View

FACTS = RunFacts("stdlib-gpt", "runs/x_stdlib-gpt", 100, "steps", "tokens", "cpu", "fp32")


def tracked(steps: int, facts: RunFacts = FACTS, **fields: object) -> tuple[Tracker, View]:
    """A tracker that has seen `steps` updates of half a second each, and its last view."""
    tracker = Tracker(facts, began=0.0)
    view = tracker.view(None, 0.0)
    for step in range(1, steps + 1):
        seen = {"loss": 10.0 / step, "time": 1000 + step / 2, "step_seconds": 0.5} | fields
        view = tracker.view(report(step, **seen), step / 2)
    return tracker, view


def shown(view: View, width: int = 100) -> str:
    stream = io.StringIO()
    console = Console(file=stream, width=width, color_system=None)
    console.print(render_frame(view, width))
    return stream.getvalue()


def test_before_the_first_update_nothing_is_known() -> None:
    _, view = tracked(0)
    assert (view.state, view.done, view.remaining_seconds, view.speed) == (
        "starting",
        0.0,
        None,
        None,
    )
    assert plain_step_line(view) == ""
    assert "waiting for the first updates" in shown(view)


def test_progress_speed_and_time_left_follow_from_the_counts() -> None:
    _, view = tracked(20)
    assert (view.state, view.done) == ("training", 20)
    assert view.remaining_seconds == pytest.approx(40.0)
    assert view.speed == pytest.approx(2048.0)
    assert view.skipped == 0


@pytest.mark.parametrize(
    ("unit", "total", "done"),
    [("steps", 100, 20), ("tokens", 102400, 20480), ("samples", 3200, 640), ("epochs", 5, 1)],
)
def test_progress_is_counted_in_the_unit_of_the_horizon(unit: Unit, total: int, done: int) -> None:
    _, view = tracked(20, dataclasses.replace(FACTS, unit=unit, total=total))
    assert view.done == done
    if unit != "epochs":
        assert view.remaining_seconds == pytest.approx(40.0)


def test_a_horizon_in_seconds_is_the_clocks() -> None:
    _, view = tracked(20, dataclasses.replace(FACTS, unit="seconds", total=60))
    assert (view.done, view.remaining_seconds) == (10.0, 50.0)
    resumed = dataclasses.replace(FACTS, unit="seconds", total=60, seconds_before=30.0)
    assert tracked(20, resumed)[1].remaining_seconds == 20.0
    assert "0:10 / 1:00" in shown(view)


def test_one_update_gives_a_first_guess() -> None:
    _, view = tracked(1)
    assert view.speed == 2048.0
    assert view.remaining_seconds == pytest.approx(49.5)


def test_the_speed_is_that_of_the_last_half_minute_and_slow_updates_have_one() -> None:
    tracker, _ = tracked(20)
    tracker.view(report(21, time=1010 + 100.0, tokens=21504), 110.0)
    view = tracker.view(report(22, time=1010 + 200.0, tokens=22528), 210.0)
    assert view.speed == pytest.approx(1024 / 100)


def test_the_time_left_shrinks_while_an_update_takes_its_time() -> None:
    tracker, view = tracked(20)
    later = tracker.view(None, 10.0 + 3.0)
    assert later.remaining_seconds == pytest.approx((view.remaining_seconds or 0) - 3.0)
    assert later.quiet_seconds == pytest.approx(3.0)
    assert "last update" not in shown(later)
    assert "last update 0:09 ago" in shown(tracker.view(None, 19.0))


def test_skipped_updates_are_the_windows_that_moved_no_step() -> None:
    _, view = tracked(20)
    view = dataclasses.replace(view, skipped=3)
    assert "skipped 3" in plain_step_line(view)
    tracker = Tracker(FACTS, 0.0)
    assert tracker.view(report(20, step=18), 1.0).skipped == 2


def test_data_wait_is_a_share_of_the_updates_time() -> None:
    _, view = tracked(4, data_seconds=0.125)
    assert view.data_wait == pytest.approx(0.25)
    assert "25.0 %" in shown(view)


def test_evaluations_and_events_are_the_latest() -> None:
    tracker, _ = tracked(20)
    tracker.note_eval(EVALUATION)
    tracker.note_eval(dataclasses.replace(EVALUATION, step=20, metrics={"loss": 1.25}))
    tracker.note_eval(dataclasses.replace(EVALUATION, name="other"))
    tracker.note_event(Event("save", 20, "saved it\nwell", {}, 1.0))
    view = tracker.view(None, 10.0)
    assert [(e.name, e.step) for e in view.evaluations] == [("validation", 20), ("other", 3)]
    assert view.evaluation_curve == ((3, 2.4), (20, 1.25))
    text = shown(view)
    assert "1.2500" in text
    assert "saved it well" in text
    tracker.note_event(Event("finished", 20, "done", {}, 1.0))
    assert tracker.view(None, 10.0).state == "finished"
    assert "took 0:10" in shown(tracker.view(None, 10.0))


def test_a_curve_is_bounded_and_spans_the_run() -> None:
    curve = ThinnedCurve(capacity=8)
    for step in range(1, 1001):
        curve.add(step, float(step))
        curve.add(step, math.nan)
    points = curve.points()
    assert len(points) <= 10
    assert points[0] == (1, 1.0)
    assert points[-1][0] >= 900
    gaps = {after[0] - before[0] for before, after in pairwise(points[1:-1])}
    assert len(gaps) == 1  # The past is drawn to the same scale as the present.
    assert [x for x, _ in points] == sorted(x for x, _ in points)


def test_non_finite_losses_are_shown_as_they_are_and_break_nothing() -> None:
    tracker, _ = tracked(20)
    view = tracker.view(report(21, loss=math.nan, grad_norm=math.inf), 11.0)
    text = shown(view)
    assert "nan" in text
    assert "inf" in text
    assert "loss nan" in plain_step_line(view)


@pytest.mark.parametrize("width", [40, 60, 76, 80, 100, 120, 200])
def test_a_frame_fits_its_width_and_keeps_its_height(width: int) -> None:
    heights = set()
    facts = dataclasses.replace(FACTS, folder="runs/" + "x" * 150, device="NVIDIA H100 80GB HBM3")
    for steps in (0, 1, 2, 50, 100):
        tracker, view = tracked(steps, facts)
        for _ in range(2):
            lines = shown(view, width).splitlines()
            assert max(map(len, lines)) <= min(width, 120)
            heights.add(len(lines))
            tracker.note_eval(
                dataclasses.replace(EVALUATION, metrics={f"metric_{i}": 1.0 for i in range(9)})
            )
            view = tracker.view(None, 0.0)
    assert heights == {15}


def test_the_frame_holds_what_a_person_asks_for() -> None:
    _, view = tracked(62, lr={"a": 1e-3, "b": 3e-4}, memory_bytes=3 * 2**30, clipped=True)
    text = shown(view, 100)
    for part in (
        "stdlib-gpt",
        "62 %",
        "62 / 100 steps",
        "ETA 0:19",
        "0.1613",
        "clipped",
        "3.00e-04 · 1.00e-03",
        "2,048 tokens/s",
        "500.0 ms",
        "3.0 GiB",
        "skipped",
        "epoch 1",
        "runs/x_stdlib-gpt",
        "no evaluation yet",
    ):
        assert part in text


def test_a_hundred_percent_means_the_end() -> None:
    _, view = tracked(20)
    assert " 99 %" in shown(dataclasses.replace(view, done=99.9))
    assert "100 %" in shown(dataclasses.replace(view, done=100))


def test_plain_lines_have_step_loss_norm_rate_speed_and_time_left() -> None:
    _, view = tracked(20)
    assert plain_step_line(view) == (
        "step 20/100  loss 0.5000  grad_norm 0.3000  lr 3.00e-04  2,048 tokens/s  ETA 0:40"
    )
    assert plain_eval_line(EVALUATION) == "eval validation at step 3  loss 2.4000"
    assert plain_event_line(Event("save", 3, "a\n b", {}, 0.0)) == "save at step 3: a b"


def test_a_sparkline_goes_from_low_to_high() -> None:
    assert sparkline([]) == ""
    assert sparkline([2.0, 2.0]) == "▄▄"
    assert sparkline([0.0, 7.0]) == "▁█"


def test_a_braille_line_joins_its_points() -> None:
    points = [(0.0, 1.0), (1.0, 0.0)]
    lines = braille_lines(points, Axes.around(points), width=4, height=2)
    assert lines == ["⠑⢄  ", "  ⠑⢄"]
    dots = sum(len(braille_dots(c)) for line in lines for c in line)
    assert dots == 8
    flat = [(0.0, 1.0), (5.0, 1.0)]
    assert braille_lines(flat, Axes.around(flat), 3, 1) == ["⠤⠤⠤"]


def test_the_picture_is_a_whole_document_without_the_network() -> None:
    tracker, _ = tracked(60)
    tracker.note_eval(EVALUATION)
    picture = frame_as_svg(tracker.view(None, 30.0), width=80)
    root = ElementTree.fromstring(picture)
    words = "".join(root.itertext())
    assert "stdlib-gpt" in words
    assert "0.1667" in words
    assert not any(braille_dots(character) for character in words)
    assert picture.count("<rect") > 30
    assert "http" not in picture.replace("http://www.w3.org/2000/svg", "")
    assert "clip-path" not in picture
