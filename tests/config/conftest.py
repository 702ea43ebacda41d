"""Property tests here assert no time, and try the same examples on every run."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("surefoot", deadline=None, derandomize=True)
settings.load_profile("surefoot")
