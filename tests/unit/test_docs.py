"""The documentation speaks of what is there: messages, links, pages."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted((ROOT / "docs").glob("*.md"))


def texts() -> str:
    """Every string of the package, one after the other; f-strings with … for what is filled in."""
    found = []
    for path in sorted((ROOT / "megatron_port").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
            elif isinstance(node, ast.JoinedStr):
                found.append("".join(str(v.value) if isinstance(v, ast.Constant) else "…" for v in node.values))
    return re.sub(r"\s+", " ", "\n".join(found))


@pytest.fixture(scope="module")
def words() -> str:
    return texts()


def test_messages_of_the_troubleshooting_page_are_the_programs(words):
    rows = [line for line in (ROOT / "docs" / "troubleshooting.md").read_text().splitlines() if line.startswith("| `")]
    assert len(rows) > 30
    unknown = []
    for row in rows:
        for message in re.findall(r"`([^`]+)`", row.split(" | ")[0]):
            for part in (p.strip(" :;,()") for p in message.split("…")):
                if len(part) > 4 and part not in words:
                    unknown.append(f"{message}: {part!r}")
    assert not unknown


def test_links_lead_somewhere():
    broken = []
    for page in [*PAGES, ROOT / "README.md", ROOT / "CONTRIBUTING.md"]:
        text = re.sub(r"```.*?```", "", page.read_text(), flags=re.S)
        for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)\s]*)?\)", text):
            if "://" not in target and not (page.parent / target).exists():
                broken.append(f"{page.name}: {target}")
    assert not broken


def test_the_site_has_every_page():
    listed = re.findall(r":\s*([\w-]+\.md)\s*$", (ROOT / "mkdocs.yml").read_text(), re.M)
    assert sorted(listed) == sorted(p.name for p in PAGES)


def test_coverage_has_no_row_without_an_answer():
    rows = [line for line in (ROOT / "docs" / "coverage.md").read_text().splitlines() if line.startswith("| ")]
    cells = [[c.strip() for c in row.strip("|").split(" | ")] for row in rows]
    assert len(cells) > 40 and all(len(c) == 3 and all(c) for c in cells), [c for c in cells if len(c) != 3]
