"""Links in the documents lead somewhere, and ARCHITECTURE.md names files that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
ASIDE = (ROOT / "fuzz/README.md", ROOT / "python/benches/README.md")
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ASIDE])
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
FILE = re.compile(r"`([\w.-]+(?:/[\w.-]+)*/|[\w.-]+(?:/[\w.-]+)+\.\w+)`")
"""A path in code style: with a slash, and either a folder's final slash or a suffix."""


def anchors(page: Path) -> set[str]:
    """The names under which headings can be linked."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in LINK.findall(FENCED.sub("", page.read_text())):
        if target.startswith(("https://", "http://")):
            continue
        path, _, anchor = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        assert there.exists(), target
        assert not anchor or anchor in anchors(there), target


def test_the_map_names_files_that_exist() -> None:
    named = FILE.findall((ROOT / "ARCHITECTURE.md").read_text())
    folders = ["", "crates", "python/tests", "python/tensorcall"]
    bases = [*(ROOT / folder for folder in folders), *ROOT.glob("crates/*/src")]

    missing = [path for path in named if not any((base / path).exists() for base in bases)]

    assert len(named) > 20
    assert missing == []
