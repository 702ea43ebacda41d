"""The Python in the README and in the pages runs, and what they point to exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from forked import run_forked

ROOT = Path(__file__).parents[2]
FOLDERS = ["docs", "docs/how-to"]
PAGES = [
    "README.md",
    *sorted(f"{f}/{page.name}" for f in FOLDERS for page in (ROOT / f).glob("*.md")),
]
FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(page: str, language: str) -> list[str]:
    text = (ROOT / page).read_text(encoding="utf-8")
    return [code for tag, code in FENCE.findall(text) if tag == language]


def python_blocks() -> list[tuple[str, int]]:
    return [(page, n) for page in PAGES for n in range(len(blocks(page, "python")))]


@pytest.mark.parametrize(("page", "number"), python_blocks())
def test_python_on_a_page_runs_by_itself(page: str, number: int, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(blocks(page, "python")[number], encoding="utf-8")
    code, printed = run_forked(script, folder=tmp_path, strict=True)
    assert code == 0, printed


@pytest.mark.parametrize("page", PAGES)
def test_links_between_pages_lead_somewhere(page: str) -> None:
    text = FENCE.sub("", (ROOT / page).read_text(encoding="utf-8"))
    targets = re.findall(r"\]\(([^)#\s]+)[^)]*\)", text)
    broken = [
        target
        for target in targets
        if "://" not in target and not ((ROOT / page).parent / target).exists()
    ]
    assert broken == []


def test_the_index_lists_every_page() -> None:
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"\]\(([^)#\s]+\.md)", index))
    pages = {
        path.relative_to(ROOT / "docs").as_posix()
        for path in (ROOT / "docs").rglob("*.md")
        if path.parent.name != "rules" and path.name != "index.md"
    }
    assert listed == pages | {"rules/index.md"}


def test_every_verb_in_a_page_exists() -> None:
    from surefoot.cli.main import app

    groups = {group.name: group.typer_instance for group in app.registered_groups}
    known = {command.name for command in app.registered_commands} | set(groups)
    words = {
        name: {command.name for command in group.registered_commands}
        | {command.callback.__name__ for command in group.registered_commands if command.callback}
        for name, group in groups.items()
    }
    for page in PAGES:
        text = (ROOT / page).read_text(encoding="utf-8")
        for verb, word in re.findall(r"^(?:\$ )?surefoot ([a-z]+)(?: ([a-z]+))?", text, re.M):
            assert verb in known, (page, verb)
            assert verb not in words or word in words[verb], (page, verb, word)


@pytest.mark.parametrize("name", ["Trainer(", "TrainStep("])
def test_the_readme_has_a_script_of_ten_lines(name: str) -> None:
    scripts = [script for script in blocks("README.md", "python") if name in script]
    assert min(len([line for line in s.splitlines() if line.strip()]) for s in scripts) <= 10
