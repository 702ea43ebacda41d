"""One frame of the live view as an SVG picture, for a page such as the README.

The picture is self-contained: it loads nothing from the network and looks the same in every font.
"""

from __future__ import annotations

import html
import os
import re

from rich.console import Console

from surefoot.observe.terminal.braille import braille_dots
from surefoot.observe.terminal.frame import render_frame
from surefoot.observe.terminal.view import View

# Sizes of a character cell in Rich's SVG export.
_CHARACTER_WIDTH = 12.2
_CHARACTER_HEIGHT = 20
_LINE_HEIGHT = 24.4
_DOT_SIZE = 3.2

_SVG = """\
<svg class="rich-terminal" viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
<style>
.{unique_id}-matrix {{ font-family: ui-monospace, "DejaVu Sans Mono", Menlo, monospace;
  font-size: {char_height}px; line-height: {line_height}px; }}
.{unique_id}-title {{ font-size: 18px; font-weight: bold; font-family: sans-serif; }}
{styles}
</style>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})">
{backgrounds}
<g class="{unique_id}-matrix" xml:space="preserve">
{matrix}
</g>
</g>
</svg>
"""

_TEXT = re.compile(
    r'<text class="(?P<style>[\w-]+)" x="(?P<x>[\d.]+)" y="(?P<y>[\d.]+)" '
    r'textLength="[\d.]+" clip-path="url\(#[\w-]+\)">(?P<text>[^<]*)</text>'
)


def frame_as_svg(view: View, *, width: int = 100, title: str = "surefoot train") -> str:
    """The frame of `view` at `width` columns, in a drawn terminal window."""
    with open(os.devnull, "w") as nowhere:
        console = Console(
            record=True, width=width, file=nowhere, force_terminal=True, color_system="truecolor"
        )
        console.print(render_frame(view, width))
        picture = console.export_svg(title=title, code_format=_SVG, unique_id="surefoot")
    return _TEXT.sub(_redraw, picture)


def _redraw(match: re.Match[str]) -> str:
    """Text without its clip path, which cuts off underscores; Braille cells as drawn dots.

    Few monospaced fonts contain Braille, and the width of a substitute would break the curve.
    """
    text = html.unescape(match["text"])
    if not any(braille_dots(character) for character in text):
        return re.sub(r' clip-path="[^"]*"', "", match[0])
    left, top = float(match["x"]), float(match["y"]) - _CHARACTER_HEIGHT
    squares = [
        f'<rect x="{left + (2 * i + column + 0.25) * _CHARACTER_WIDTH / 2:.1f}" '
        f'y="{top + (row + 0.5) * _LINE_HEIGHT / 4:.1f}" '
        f'width="{_DOT_SIZE}" height="{_DOT_SIZE}" rx="1"/>'
        for i, character in enumerate(text)
        for column, row in braille_dots(character)
    ]
    return f'<g class="{match["style"]}">{"".join(squares)}</g>'
