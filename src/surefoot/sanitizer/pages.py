"""The pages of the rules in the documentation, made from the page beside each rule.

    python -m surefoot.sanitizer.pages docs/rules

Says nothing that those pages do not say.
"""

from __future__ import annotations

import sys
from pathlib import Path

from surefoot.sanitizer.rules import OWN, Registered, registry

CERTAINTIES = {
    "proof": "the observation contradicts what PyTorch does, whatever was meant",
    "strong": "only a deliberate pattern would look the same",
    "heuristic": "a threshold, or a guess of what was meant",
    "convention": "advice",
}


def rule_page(entry: Registered) -> str:
    """The page of one rule, as Markdown."""
    info, certainty = entry.info, entry.info.certainty.value
    return f"""# {info.code} {info.slug}

{info.title}

| family | severity | certainty |
|---|---|---|
| {entry.family} | {info.severity.value} | {certainty}: {CERTAINTIES[certainty]} |

## What is observed

{info.observes}

## Why it is bad

{info.why}

## Example

```python
{info.example}
```

## Fix

{info.fix}

Where it is on purpose: `# surefoot: ignore[{info.code}] reason` on the line of the finding.

## Source

{info.source}
"""


def own_rules() -> list[Registered]:
    """The rules of this package, by code."""
    return [entry for entry in registry().entries.values() if entry.origin == OWN]


def overview_page() -> str:
    """The list of all rules, as Markdown."""
    entries = own_rules()
    parts = [
        "# Rules of the audit\n",
        f"{len(entries)} rules. `surefoot show rules CODE` prints the same pages.\n",
    ]
    for family in dict.fromkeys(entry.family for entry in entries):
        infos = [entry.info for entry in entries if entry.family == family]
        rows = [
            f"| [{i.code}]({i.code}.md) | {i.slug} | {i.certainty.value} | {i.title} |"
            for i in infos
        ]
        head = f"## {family.capitalize()}\n\n| code | rule | certainty | what is wrong |\n"
        parts.append(head + "|---|---|---|---|\n" + "\n".join(rows) + "\n")
    return "\n".join(parts)


def all_pages() -> dict[str, str]:
    """File name and content of every page."""
    pages = {f"{entry.info.code}.md": rule_page(entry) for entry in own_rules()}
    return {"index.md": overview_page(), **pages}


def write_pages(folder: Path) -> None:
    """Writes all pages, and removes those of rules that are gone."""
    folder.mkdir(parents=True, exist_ok=True)
    pages = all_pages()
    for file in folder.glob("*.md"):
        if file.name not in pages:
            file.unlink()
    for name, text in pages.items():
        (folder / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write_pages(Path(sys.argv[1]))
