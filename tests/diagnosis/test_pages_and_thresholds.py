"""The words of the causes and their thresholds: each is complete, and each is used."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from string import Formatter

import pytest

from surefoot.core.errors import DataError
from surefoot.diagnosis import thresholds
from surefoot.diagnosis.causes import all_causes
from surefoot.diagnosis.causes.base import Cause, CauseInfo
from surefoot.diagnosis.causes.page import PAGES, own_page, read_page
from surefoot.diagnosis.log_features.log import QUANTITIES

ROOM = PAGES.parents[1]
OWN = [cause for cause in all_causes() if cause.origin == "surefoot"]


def module_of(cause: Cause) -> ast.Module:
    file = PAGES.parent / f"{cause.look.__module__.rpartition('.')[2]}.py"
    return ast.parse(file.read_text(encoding="utf-8"))


def test_each_page_is_that_of_a_cause() -> None:
    assert {path.stem for path in PAGES.glob("*.md")} == {cause.info.slug for cause in OWN}


@pytest.mark.parametrize("cause", OWN, ids=lambda cause: cause.info.slug)
def test_each_sign_is_looked_for_and_given_what_it_names(cause: Cause) -> None:
    tree = module_of(cause)
    texts = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)}
    given = {node.arg for node in ast.walk(tree) if isinstance(node, ast.keyword)} | texts
    for name, text in cause.info.signs.items():
        assert name in texts
        assert 0 < text.score < 1
        named = {field for _, field, _, _ in Formatter().parse(text.message) if field}
        assert named <= given | QUANTITIES.keys()
    assert set(cause.info.evidence) <= QUANTITIES.keys()


@pytest.mark.parametrize("cut", ["slug: ", "## Fix", "### still-rising, ", "certainty: strong"])
def test_a_page_that_lacks_a_part_is_an_error(cut: str, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text((PAGES / "warmup-too-long.md").read_text(encoding="utf-8").replace(cut, ""))
    with pytest.raises(DataError, match="not complete"):
        read_page(page)


def test_a_page_is_read_whole() -> None:
    info = own_page("warmup-too-long")
    assert isinstance(info, CauseInfo)
    assert info.explains == ("rate-too-low", "underfitting")
    assert info.signs["still-rising"].message.startswith("The rate rises from {first_rate:.3g} to ")
    assert "\n" not in info.why + info.fix + info.observes


def test_each_threshold_has_a_unit_and_a_reason_and_is_used() -> None:
    table = {
        name: value
        for name, value in vars(thresholds).items()
        if isinstance(value, (thresholds.Threshold, thresholds.CountThreshold))
    }
    assert len(table) > 100
    for value in table.values():
        assert len(value.unit) > 3
        assert len(value.why) > 10
    files = [file for file in ROOM.rglob("*.py") if file.name != "thresholds.py"]
    found = (
        re.findall(r"limits\.([A-Z_0-9]+)", file.read_text(encoding="utf-8")) for file in files
    )
    assert {name for names in found for name in names} == set(table)
