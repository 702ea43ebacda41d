"""The curve between its axes. How dots are placed is tested where they are drawn."""

from __future__ import annotations

from surefoot.cli.plot import with_axes


def test_the_axes_carry_the_range() -> None:
    lines = with_axes([(0.0, 3e-4), (99.0, 1e-4)], "updates", width=30, height=4)
    assert [line.partition("│")[0].strip() for line in lines[:4]] == ["0.0003", "", "", "0"]
    assert lines[-1].split() == ["0", "99", "updates"]
    assert len({len(line) for line in lines}) == 1


def test_zero_is_at_the_bottom_whatever_the_lowest_value() -> None:
    lines = with_axes([(0.0, 1.0), (10.0, 0.9)], "updates", width=10, height=10)
    assert all(not line.partition("│")[2].strip() for line in lines[2:10])
    assert lines[0].partition("│")[2].strip()


def test_a_peak_between_two_columns_is_drawn() -> None:
    points = [(float(n), 1.0 if n == 501 else 0.0) for n in range(1000)]
    lines = with_axes(points, "updates", width=5, height=6)
    assert all(line.partition("│")[2].strip() for line in lines[:6])


def test_a_rate_of_zero_throughout_can_be_drawn() -> None:
    assert with_axes([(0.0, 0.0)], "updates", height=3)[0].startswith("1 │")
