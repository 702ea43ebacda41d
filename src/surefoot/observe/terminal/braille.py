"""Draws curves with characters: a line of Braille dots, and a one-row sparkline.

Pure functions from numbers to text, without colours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

Point = tuple[float, float]

_BLOCKS = "▁▂▃▄▅▆▇█"
_BRAILLE = 0x2800
# The bit of each dot in a Braille cell, by row and column.
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))


@dataclass(frozen=True, slots=True)
class Axes:
    """The range of values of a plot."""

    left: float
    right: float
    low: float
    high: float

    @classmethod
    def around(cls, *curves: Sequence[Point]) -> Axes:
        """The smallest axes that contain every point; at least one point is needed."""
        points = [point for curve in curves for point in curve]
        xs = [x for x, _ in points]
        ys = [y for _, y in points]
        return cls(min(xs), max(xs), min(ys), max(ys))

    def place(self, point: Point, columns: int, rows: int) -> tuple[int, int]:
        """Column and row (0 at the top) of a point on a grid; a flat curve is in the middle."""
        x, y = point
        across = (x - self.left) / (self.right - self.left) if self.right > self.left else 0.0
        up = (y - self.low) / (self.high - self.low) if self.high > self.low else 0.5
        return round(across * (columns - 1)), round((1 - up) * (rows - 1))


def sparkline(values: Sequence[float]) -> str:
    """One character per value, from low to high.

    >>> sparkline([4.0, 3.0, 2.0, 2.0, 1.0])
    '█▅▃▃▁'
    """
    if not values:
        return ""
    low, high = min(values), max(values)
    if high == low:
        return _BLOCKS[3] * len(values)
    top = len(_BLOCKS) - 1
    return "".join(_BLOCKS[int((value - low) / (high - low) * top)] for value in values)


def braille_lines(points: Sequence[Point], axes: Axes, width: int, height: int) -> list[str]:
    """The curve through `points`, `height` rows of `width` characters, two by four dots each."""
    columns, rows = width * 2, height * 4
    cells = [[0] * width for _ in range(height)]

    def dot(column: int, row: int) -> None:
        cells[row // 4][column // 2] |= _DOTS[row % 4][column % 2]

    before: tuple[int, int] | None = None
    for point in points:
        here = axes.place(point, columns, rows)
        dot(*here)
        if before is not None:
            for column, row in _between(before, here):
                dot(column, row)
        before = here
    # An empty cell is a space: some fonts draw the empty Braille cell as dots.
    return ["".join(chr(_BRAILLE + cell) if cell else " " for cell in line) for line in cells]


def braille_dots(character: str) -> list[tuple[int, int]]:
    """Column and row of each dot of a Braille cell; none for any other character.

    >>> braille_dots("⠃"), braille_dots("a")
    ([(0, 0), (0, 1)], [])
    """
    cell = ord(character) - _BRAILLE
    if not 0 < cell < 256:
        return []
    return [(c, r) for r, bits in enumerate(_DOTS) for c, bit in enumerate(bits) if cell & bit]


def _between(start: tuple[int, int], end: tuple[int, int]) -> list[tuple[int, int]]:
    """The dots of the straight line between two dots."""
    length = max(abs(end[0] - start[0]), abs(end[1] - start[1]))
    return [
        (
            round(start[0] + (end[0] - start[0]) * i / length),
            round(start[1] + (end[1] - start[1]) * i / length),
        )
        for i in range(1, length)
    ]
