"""Numbers as text for people. Nothing parses these texts."""

from __future__ import annotations

import math
from pathlib import Path


def format_bytes(count: float) -> str:
    """A count of bytes.

    >>> format_bytes(1536), format_bytes(3 * 2**30), format_bytes(12)
    ('1.5 KiB', '3.0 GiB', '12 B')
    """
    if count < 1024:
        return f"{count:.0f} B"
    unit = "TiB"
    for candidate in ("KiB", "MiB", "GiB", "TiB"):
        count /= 1024
        if count < 1024:
            unit = candidate
            break
    return f"{count:.1f} {unit}"


def format_path(path: Path) -> str:
    """A path relative to the working directory if it is below it."""
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)


def format_duration(seconds: float) -> str:
    """Hours, minutes and seconds.

    >>> format_duration(72), format_duration(3 * 3600 + 62), format_duration(26 * 3600)
    ('1:12', '3:01:02', '1 d 02:00')
    """
    whole = max(0, round(seconds))
    hours, rest = divmod(whole, 3600)
    minutes, seconds = divmod(rest, 60)
    if hours >= 24:
        return f"{hours // 24} d {hours % 24:02d}:{minutes:02d}"
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"


def format_count(count: float) -> str:
    """A count with thousands separators; abbreviated if large.

    >>> format_count(1240), format_count(98_304_000), format_count(2.5e9)
    ('1,240', '98.3 M', '2.5 G')
    """
    for size, sign in ((1e12, "T"), (1e9, "G"), (1e7, "M")):
        if count >= size:
            return f"{count / (1e6 if sign == 'M' else size):.1f} {sign}"
    return f"{count:,.0f}"


def format_number(value: float) -> str:
    """A metric or loss with about five digits.

    >>> format_number(2.81341), format_number(0.00012), format_number(123456.0)
    ('2.8134', '1.200e-04', '1.235e+05')
    """
    if not math.isfinite(value):
        return str(value)
    if value == 0 or 1e-3 <= abs(value) < 1e4:
        return f"{value:.4f}" if abs(value) < 100 else f"{value:.2f}"
    return f"{value:.3e}"
