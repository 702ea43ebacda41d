"""The curve in the terminal: shape, peaks, and what it refuses."""

from __future__ import annotations

import pytest

from surefoot.cli.plot import BRAILLE, curve, with_axes


def dots(lines: list[str]) -> set[tuple[int, int]]:
    """Dots that are set, as (column, height above the bottom)."""
    bits = {0x01: (0, 0), 0x02: (0, 1), 0x04: (0, 2), 0x40: (0, 3)}
    bits |= {0x08: (1, 0), 0x10: (1, 1), 0x20: (1, 2), 0x80: (1, 3)}
    rows = len(lines) * 4
    return {
        (2 * x + dx, rows - 1 - (4 * y + dy))
        for y, line in enumerate(lines)
        for x, character in enumerate(line)
        for bit, (dx, dy) in bits.items()
        if (ord(character) - BRAILLE) & bit
    }


def test_a_rising_line_rises() -> None:
    drawn = curve([float(n) for n in range(8)], width=4, height=2)
    assert dots(drawn) == {(n, n) for n in range(8)}


def test_a_peak_between_two_columns_is_drawn() -> None:
    values = [0.0] * 1000
    values[501] = 1.0
    heights = {height for _, height in dots(curve(values, width=5, height=2))}
    assert heights == set(range(8))


def test_fewer_values_than_columns_fill_the_width() -> None:
    columns = {column for column, _ in dots(curve([1.0, 0.5], width=6, height=3))}
    assert columns == set(range(12))


def test_all_zero_lies_on_the_bottom() -> None:
    assert {height for _, height in dots(curve([0.0, 0.0], width=2, height=2))} == {0}


@pytest.mark.parametrize("values", [[], [-1.0], [float("nan")], [float("inf")]])
def test_what_is_no_curve_is_refused(values: list[float]) -> None:
    with pytest.raises(ValueError, match="finite and at least 0"):
        curve(values)


def test_axes_carry_the_labels() -> None:
    lines = with_axes(curve([1.0, 0.0], 10, 3), "3e-4", "0", "0", "99")
    assert [line.partition("│")[0].strip() for line in lines[:3]] == ["3e-4", "", "0"]
    assert lines[-1].split() == ["0", "99"]
    assert len({len(line) for line in lines}) == 1
