"""A headless Chromium that loads a page without a network, and tells what the page did."""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)

OWN = "not an origin"


@dataclass(frozen=True)
class Seen:
    """What a browser saw."""

    dom: str
    """The document after its script has run."""
    console: str
    requests: tuple[str, ...]
    """Every URL that was asked for, but the page itself."""


def load(page: Path, width: int = 1280, *, picture: Path | None = None) -> Seen:
    """Loads a page; the network log of the browser says what it asked for.

    A headless window is at least 500 wide, so a narrower page stands in a frame of its width.
    """
    assert CHROMIUM is not None
    with tempfile.TemporaryDirectory() as folder:
        target = page
        if width < 500:
            target = Path(folder) / "frame.html"
            source = page.read_text("utf-8").replace("&", "&amp;").replace('"', "&quot;")
            target.write_text(
                f'<iframe srcdoc="{source}" style="border:0;width:{width}px;height:4000px">'
            )
        log = Path(folder) / "net.json"
        shown = subprocess.run(
            [
                CHROMIUM,
                "--headless=new",
                "--no-sandbox",
                "--disable-gpu",
                "--disable-background-networking",
                "--disable-component-update",
                "--no-first-run",
                "--host-resolver-rules=MAP * ~NOTFOUND",
                f"--user-data-dir={folder}/profile",
                f"--log-net-log={log}",
                "--enable-logging=stderr",
                f"--window-size={max(width, 500)},2000",
                "--virtual-time-budget=4000",
                *([f"--screenshot={picture}"] if picture else ["--dump-dom"]),
                target.as_uri(),
            ],
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        )
        console = "\n".join(line for line in shown.stderr.splitlines() if "CONSOLE" in line)
        return Seen(shown.stdout, console, _requests(log, {page.as_uri(), target.as_uri()}))


def _requests(log: Path, own: set[str]) -> tuple[str, ...]:
    text = log.read_text("utf-8").rstrip().rstrip(",")
    try:
        events = json.loads(text)["events"]
    except ValueError:
        events = json.loads(text + "]}")["events"]
    # What the browser asks for by itself, such as updates, has no page that began it.
    asked = (event.get("params", {}) for event in events)
    urls = {p["url"] for p in asked if "url" in p and p.get("initiator", OWN) != OWN}
    return tuple(sorted(url for url in urls - own if url.startswith(("http", "ws", "file", "ftp"))))
