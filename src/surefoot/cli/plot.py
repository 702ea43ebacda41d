"""Draws a curve with axes for the terminal. Pure: numbers in, lines of text out."""

from __future__ import annotations

from collections.abc import Sequence

from surefoot.observe.terminal.braille import Axes, Point, braille_lines


def with_axes(
    points: Sequence[Point], x_label: str, width: int = 64, height: int = 10
) -> list[str]:
    """Lines that draw a curve, with a y-axis from zero and the first and last x below.

    Args:
        points: at least one; values are nonnegative.
        x_label: unit of the x-axis.
        width: characters of the plot area.
        height: lines of the plot area.
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
