"""The documentation speaks of what is there: messages, links, pages."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted((ROOT / "docs").glob("*.md"))
EVIDENCE = sorted((ROOT / "benchmarks" / "evidence").glob("*.md"))
sys.path.insert(0, str(ROOT / "scripts"))


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
    for page in [*PAGES, *EVIDENCE, ROOT / "README.md", ROOT / "CONTRIBUTING.md"]:
        text = re.sub(r"```.*?```", "", page.read_text(), flags=re.S)
        for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)\s]*)?\)", text):
            if "://" not in target and not (page.parent / target).exists():
                broken.append(f"{page.name}: {target}")
    assert not broken


def heading_ids(page: Path) -> set[str]:
    """Anchors of a page's headings, as GitHub and mkdocs make them of plain words."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.S)
    found = re.findall(r"^#+ (.*)$", text, re.M)
    return {re.sub(r"\s+", "-", re.sub(r"[^\w\s-]", "", title.lower()).strip()) for title in found}


def test_anchors_lead_to_headings():
    broken = []
    for page in [*PAGES, *EVIDENCE, ROOT / "README.md", ROOT / "CONTRIBUTING.md"]:
        text = re.sub(r"```.*?```", "", page.read_text(), flags=re.S)
        for target, anchor in re.findall(r"\]\(([^)#\s]*)#([^)\s]*)\)", text):
            there = page.parent / target if target else page
            if "://" not in target and there.suffix == ".md" and anchor not in heading_ids(there):
                broken.append(f"{page.name}: {target}#{anchor}")
    assert not broken


def test_the_site_has_every_page():
    listed = re.findall(r":\s*([\w-]+\.md)\s*$", (ROOT / "mkdocs.yml").read_text(), re.M)
    assert sorted(listed) == sorted(p.name for p in PAGES)
    index = (ROOT / "docs" / "index.md").read_text()
    assert not [p.name for p in PAGES if p.name != "index.md" and f"({p.name})" not in index]


WORDS = 45_000
"""Of all pages but the generated. What proves and measures goes to benchmarks/evidence."""


def test_the_pages_are_a_book_that_a_user_can_read() -> None:
    generated = {"config.md", "commands.md", "python-api.md", "metrics.md"}
    words = {page.name: len(page.read_text().split()) for page in PAGES if page.name not in generated}
    assert sum(words.values()) <= WORDS, f"{sum(words.values())} words; the longest pages: " + ", ".join(
        sorted(words, key=words.__getitem__)[-5:])


def test_generated_pages_and_pictures_are_current():
    import docs_pictures
    import docs_reference

    assert not docs_reference.stale(), "run: python scripts/docs_reference.py"
    old = [name for name, draw in docs_pictures.PICTURES.items()
           if (picture := draw()) and (ROOT / "docs" / "images" / f"{name}.svg").read_text() != picture]
    assert not old, "run: python scripts/docs_pictures.py"


def test_prose_is_held_to_the_rules():
    """The linter's rules find what they are there for; ``make lint`` runs it over all pages."""
    import readability

    long = "# A\n\n" + "word " * 45 + "end.\n"
    wrong = {
        long: "a sentence of 46 words", "# A\n\nThe run goes on.\n": "'goes on'", "## A\n": "first level",
        "# A\n\n### B\n": "skips a level", "# A.\n": "ends in", "# A\n\n## B\n\n## B\n": "twice",
        "# A\n\n| a |\n|---|\n| equal to the bit |\n": "'to the bit'",
        "# A\n\n" + "It was written down by them. " * 12 + "\n": "passive",
    }
    for text, remark in wrong.items():
        assert any(remark in str(found) for found in readability.check("x.md", text)), remark
    for phrase in ("28 bytes a row", "one line a step", "the state lies in files", "set; else the default", "dearer",
                   "1.5 s by the wall", "the own ones", "held to its bounds", "links, each way", "so many times",
                   "what came with ZeRO", "their means are apart", "made of it", "casts of today", "nobody's label"):
        assert list(readability.check("x.md", f"# A\n\n| a |\n|---|\n| {phrase} |\n")), phrase
    fine = "# A\n\nA run resumes. See `goes on` and:\n\n```sh\n# to the bit\n```\n\n- one\n- two\n"
    assert not list(readability.check("x.md", fine))


def test_coverage_has_no_row_without_an_answer():
    text = (ROOT / "benchmarks" / "evidence" / "coverage.md").read_text()
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    cells = [[c.strip() for c in row.strip("|").split(" | ")] for row in rows]
    assert len(cells) > 40 and all(len(c) == 3 and all(c) for c in cells), [c for c in cells if len(c) != 3]
