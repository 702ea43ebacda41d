"""One documentation page per rule, made from the rule's own record.

    python -m surefoot.sanitizer.pages docs/rules

Says nothing that the record does not say.
"""

from __future__ import annotations

import sys
from pathlib import Path

from surefoot.sanitizer.rules import all_rules
from surefoot.sanitizer.rules.base import RuleInfo

CERTAINTIES = {
    "proof": "the observation contradicts what PyTorch does, whatever was meant",
    "strong": "only a deliberate pattern would look the same",
    "heuristic": "a threshold, or a guess of what was meant",
    "convention": "advice",
}


def rule_page(info: RuleInfo) -> str:
    """The page of one rule, as Markdown."""
    certainty = info.certainty.value
    return f"""# {info.code} {info.slug}

{info.title}

| family | severity | certainty |
|---|---|---|
| {info.family} | {info.severity.value} | {certainty}: {CERTAINTIES[certainty]} |

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


def overview_page() -> str:
    """The list of all rules, as Markdown."""
    infos = [rule.info for rule in all_rules()]
    parts = [
        "# Rules of the audit\n",
        f"{len(infos)} rules. `surefoot show rules CODE` prints the same pages.\n",
    ]
    for family in dict.fromkeys(info.family for info in infos):
        rows = [
            f"| [{i.code}]({i.code}.md) | {i.slug} | {i.certainty.value} | {i.title} |"
            for i in infos
            if i.family == family
        ]
        head = f"## {family.capitalize()}\n\n| code | rule | certainty | what is wrong |\n"
        parts.append(head + "|---|---|---|---|\n" + "\n".join(rows) + "\n")
    return "\n".join(parts)


def all_pages() -> dict[str, str]:
    """File name and content of every page."""
    pages = {f"{rule.info.code}.md": rule_page(rule.info) for rule in all_rules()}
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
