"""A bad recipe is answered at once: core loads the standard library alone, config no torch."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

HEAVY = ("torch", "numpy", "transformers", "rich", "typer")


@pytest.mark.parametrize(
    ("modules", "absent"),
    [
        (
            "core.counting core.errors core.finding core.plateau core.reports core.schedules "
            "core.stopping core.units",
            (*HEAVY, "pydantic", "scipy", "yaml"),
        ),
        ("config config.building config.load config.notes config.sections", HEAVY),
    ],
)
def test_what_an_import_loads(modules: str, absent: tuple[str, ...]) -> None:
    imports = ";".join(f"import surefoot.{module}" for module in modules.split())
    code = f"import json, sys; {imports}; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not set(absent) & set(json.loads(done.stdout))
