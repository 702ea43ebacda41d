"""Puts a curve between axes, for the terminal. Pure: numbers in, lines of text out."""

from __future__ import annotations

from collections.abc import Sequence

from surefoot.observe.terminal.braille import Axes, Point, braille_lines


def with_axes(
    points: Sequence[Point], x_label: str, width: int = 64, height: int = 10
) -> list[str]:
    """Lines that draw a curve over its range, from zero up, with its first and last x below.

    Args:
        points: at least one; no value is negative.
        x_label: what the numbers below count.
        width: characters of the drawing alone.
        height: lines of the drawing alone.
    """
    around = Axes.around(points)
    axes = Axes(around.left, around.right, 0.0, around.high or 1.0)
    lines = braille_lines(points, axes, width, height)
    top, bottom = f"{axes.high:.3g}", "0"
    margin = max(len(top), len(bottom))
    labels = [top, *[""] * (height - 2), bottom][:height]
    drawn = [f"{label.rjust(margin)} │{line}" for label, line in zip(labels, lines, strict=True)]
    drawn.append(" " * margin + " └" + "─" * width)
    left, right = f"{axes.left:,.0f}", f"{axes.right:,.0f} {x_label}"
    gap = max(1, width - len(left) - len(right))
    drawn.append(" " * (margin + 2) + left + " " * gap + right)
    return drawn
