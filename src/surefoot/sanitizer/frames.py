"""Where in the user's own code something was called from.

A frame is the user's when its file lies outside Python's library, the installed packages and
surefoot itself. Never keeps a frame: frames keep every local variable alive.
"""

from __future__ import annotations

import os
import site
import sys
import sysconfig
from types import CodeType, FrameType
from typing import NamedTuple


class Site(NamedTuple):
    """A place in the user's code."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{os.path.basename(self.file)}:{self.line}" if self.file else "unknown place"


NOWHERE = Site("", 0, "")


def _library_roots() -> tuple[str, ...]:
    roots = {os.path.dirname(os.path.dirname(os.path.abspath(__file__)))}
    roots |= {sysconfig.get_paths()[key] for key in ("stdlib", "platstdlib", "purelib", "platlib")}
    roots |= set(site.getsitepackages())
    roots.add(os.path.dirname(os.path.abspath(os.__file__)))
    return tuple(os.path.join(os.path.realpath(root), "") for root in sorted(roots))


_ROOTS = _library_roots()
_known: dict[str, bool] = {}
_installed: dict[str, bool] = {}


def _is_installed_in(folder: str) -> bool:
    # Where installers put packages (also by `pip install --target`), they leave a record.
    known = _installed.get(folder)
    if known is None:
        try:
            known = any(name.endswith(".dist-info") for name in os.listdir(folder))
        except OSError:
            known = False
        _installed[folder] = known
    return known


def _is_below_installed(file: str) -> bool:
    folder = os.path.dirname(os.path.realpath(file))
    while os.path.isfile(os.path.join(folder, "__init__.py")):
        folder = os.path.dirname(folder)
        if folder in sys.path and _is_installed_in(folder):
            return True
    return False


def is_user_file(file: str) -> bool:
    """Whether `file` is the user's own code."""
    known = _known.get(file)
    if known is None:
        known = not file.startswith("<") and not os.path.realpath(file).startswith(_ROOTS)
        known = known and "site-packages" not in file and "dist-packages" not in file
        known = known and not _is_below_installed(file)
        _known[file] = known
    return known


def user_site(depth: int = 1) -> Site:
    """The innermost place in the user's code, `depth` frames up from the caller."""
    frame: FrameType | None = sys._getframe(depth)
    known = _known
    while frame is not None:
        code: CodeType = frame.f_code
        file = code.co_filename
        # Asked for every event: what is known already costs one look-up.
        if known[file] if file in known else is_user_file(file):
            return Site(file, frame.f_lineno, code.co_qualname)
        frame = frame.f_back
    return NOWHERE


def user_stack(depth: int = 1, most: int = 8) -> tuple[Site, ...]:
    """The places in the user's code that led here, the innermost first."""
    frame: FrameType | None = sys._getframe(depth)
    found: list[Site] = []
    while frame is not None and len(found) < most:
        code = frame.f_code
        if is_user_file(code.co_filename):
            found.append(Site(code.co_filename, frame.f_lineno, code.co_qualname))
        frame = frame.f_back
    return tuple(found)


def called_by_user(depth: int = 2) -> bool:
    """Whether the frame `depth` up is the user's own, with no library between."""
    try:
        return is_user_file(sys._getframe(depth).f_code.co_filename)
    except ValueError:
        return False
