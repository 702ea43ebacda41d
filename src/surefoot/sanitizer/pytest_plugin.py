"""The pytest fixture `surefoot_audit`: the test's training loop runs under the audit.

Loaded by pytest wherever surefoot is installed, so it imports no torch until a test asks for it.
Changes nothing of tests that do not.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import pytest

from surefoot.core.finding import Certainty, Finding

if TYPE_CHECKING:
    from surefoot.sanitizer.session import Audit

MARKER = "surefoot_audit(level='light', steps=None): how the fixture of that name looks at a test"


def pytest_configure(config: pytest.Config) -> None:
    """Registers the marker."""
    config.addinivalue_line("markers", MARKER)


@pytest.fixture
def surefoot_audit(request: pytest.FixtureRequest) -> Iterator[Audit]:
    """Audits the test from here to its end, which fails where a proof was found.

    Anything less certain is shown beside the test's output. `surefoot_audit.end()` ends the audit
    earlier; `surefoot_audit.findings` then holds what was found.
    """
    marker = request.node.get_closest_marker("surefoot_audit")
    options: dict[str, Any] = {} if marker is None else dict(marker.kwargs)
    watch: Audit = importlib.import_module("surefoot.sanitizer.session").audit(**options)
    with watch:
        yield watch
    proofs = [f for f in watch.findings if f.certainty is Certainty.PROOF]
    others = [f for f in watch.findings if f.certainty is not Certainty.PROOF]
    if others:
        request.node.add_report_section("teardown", "surefoot audit", _text(others))
    if proofs:
        pytest.fail(f"surefoot audit\n{_text(proofs)}", pytrace=False)


def _text(findings: Sequence[Finding]) -> str:
    return "\n".join(
        f"{f.file or 'no single line'}:{f.line}: {f.severity.value} {f.code} {f.slug}"
        f" ({f.certainty.value})\n  {f.message}\n  fix: {f.fix}"
        for f in findings
    )
