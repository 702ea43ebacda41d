"""Draws one curve with characters, for the terminal. Pure: numbers in, lines of text out."""

from __future__ import annotations

from collections.abc import Sequence

DOTS_ACROSS, DOTS_DOWN = 2, 4
BRAILLE = 0x2800
DOT_BITS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
"""Bit of each dot of a braille cell by (row, column), as Unicode numbers them."""


def curve(values: Sequence[float], width: int = 64, height: int = 10) -> list[str]:
    """Lines of `width` braille characters that draw `values` over their index, zero at the bottom.

    Where several values fall into one column of dots, the whole range between them is drawn, so
    that no peak is lost.

    Raises:
        ValueError: there are no values, or one is negative or not finite.

    >>> curve([0.0, 1.0], width=1, height=1)
    ['⡈']
    """
    if not values or not all(0 <= value < float("inf") for value in values):
        raise ValueError("a curve needs values that are finite and at least 0")
    columns, rows = width * DOTS_ACROSS, height * DOTS_DOWN
    top = max(values) or 1.0
    cells = [[0] * width for _ in range(height)]
    for column in range(columns):
        low_index = column * len(values) // columns
        high_index = max(low_index + 1, (column + 1) * len(values) // columns)
        part = values[low_index:high_index]
        low, high = (round(value / top * (rows - 1)) for value in (min(part), max(part)))
        for dot in range(low, high + 1):
            row = rows - 1 - dot
            bit = DOT_BITS[row % DOTS_DOWN][column % DOTS_ACROSS]
            cells[row // DOTS_DOWN][column // DOTS_ACROSS] |= bit
    return ["".join(chr(BRAILLE + cell) for cell in line) for line in cells]


def with_axes(lines: Sequence[str], top: str, bottom: str, left: str, right: str) -> list[str]:
    """The same drawing with the value at its top and bottom, and what stands left and right."""
    margin = max(len(top), len(bottom))
    labels = [top, *[""] * (len(lines) - 2), bottom][: len(lines)]
    drawn = [f"{label.rjust(margin)} │{line}" for label, line in zip(labels, lines, strict=True)]
    width = len(lines[0])
    drawn.append(" " * margin + " └" + "─" * width)
    gap = max(1, width - len(left) - len(right))
    drawn.append(" " * (margin + 2) + left + " " * gap + right)
    return drawn
