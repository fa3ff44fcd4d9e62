"""The comparison with other systems: tables, evidence behind each cell, and a check that sees what changed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import comparison  # noqa: E402

DATA = """
[[project]]
key = "other"
name = "Other"
url = "https://example.org/other"
commit = "COMMIT"
date = 2026-08-22
column = "Other"

[[row]]
title = "schedules"
[row.cells.ours]
text = "[yes](docs/a.md)"
evidence = [{ path = "docs/a.md", text = "every schedule" }]
[row.cells.other]
text = "ZB-V"
evidence = [{ path = "src/pipe.py", line = 3, text = "ZBV" }]
searched = { words = ["DualPipe"], paths = ["src"] }
"""
BEHIND = DATA[DATA.rindex("evidence = "):]
SOURCE = "import torch\n\nSCHEDULES = {'1F1B', 'ZBV'}\n"


def test_pages_are_what_the_file_gives_and_own_cells_hold() -> None:
    projects, rows = comparison.load()
    stale = [path.name for path, text, wanted in comparison.pages(projects, rows) if text != wanted]
    assert not stale, "run: python scripts/comparison.py --write"
    assert not [(place, fault) for place, fault in comparison.check_ours(rows) if fault]
    assert len(projects) == 7 and len(rows) > 16
    for row in rows:  # "none found" without the words that were searched would be a claim without a check
        for key, cell in row.cells.items():
            assert key == "ours" or "found" not in cell.text or cell.words, (row.title, key)
    page = (ROOT / "benchmarks" / "evidence" / "comparison.md").read_text()
    assert all(f"{p.url}/blob/{p.commit}/" in page for p in projects)


@pytest.mark.parametrize(("old", "new", "message"), [
    ("[row.cells.other]", "[row.cells.another]", "wanted are"),
    (BEHIND, "", "wants evidence"),
    (', paths = ["src"]', ', paths = []', "wants evidence"),
    ("line = 3, ", "", "without a line"),
])
def test_a_cell_with_nothing_behind_it_is_refused(tmp_path: Path, old: str, new: str, message: str) -> None:
    assert old in DATA
    file = tmp_path / "comparison.toml"
    file.write_text(DATA.replace(old, new))
    with pytest.raises(ValueError, match=message):
        comparison.load(file)


def commit(clone: Path, source: str | None) -> str:
    """Commit this text of src/pipe.py, or its removal, and return the commit."""
    def git(*arguments: str) -> str:
        return subprocess.run(["git", "-c", "user.name=t", "-c", "user.email=t@t", "-c", "commit.gpgsign=false",
                               *arguments], cwd=clone, check=True, capture_output=True, text=True).stdout.strip()

    if not clone.exists():
        (clone / "src").mkdir(parents=True)
        git("init", "-q")
    (clone / "src" / "other.py").write_text("")
    path = clone / "src" / "pipe.py"
    if source is None:
        path.unlink()
    else:
        path.write_text(source)
    git("add", "-A")
    git("commit", "-q", "--allow-empty", "-m", "x")
    return git("rev-parse", "HEAD")


def test_check_finds_what_no_longer_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                           capsys: pytest.CaptureFixture[str]) -> None:
    clone, bare, file = tmp_path / "clones" / "other", tmp_path / "bare" / "team" / "repo", tmp_path / "comparison.toml"

    def faults(of: str, folder: Path) -> list[str]:
        file.write_text(DATA.replace("COMMIT", of))
        return [fault for _, fault in comparison.check(*comparison.load(file), folder) if fault]

    first = commit(clone, SOURCE)
    expected = {
        "# new line\n" + SOURCE: ["'ZBV' is on line 4"],
        SOURCE.replace("ZBV", "ZB1P"): ["no line has 'ZBV'"],
        SOURCE + "# a dualpipe\n": ["1 lines have one of the words: src/pipe.py:4:# a dualpipe"],
        "# a form feed, one line for GitHub\f" + SOURCE: [],
    }
    later = {source: commit(clone, source) for source in expected}
    gone = commit(clone, None)
    subprocess.run(["git", "clone", "-q", "--bare", clone, bare], check=True)
    for folder in (tmp_path / "clones", tmp_path / "bare", clone):  # the folder may be the clone itself
        assert faults(first, folder) == []  # the commit counts, not what is checked out
        assert {source: faults(of, folder) for source, of in later.items()} == expected
        assert faults(gone, folder) == ["no such file"]
        assert "no clone in" in faults("0" * 40, folder)[0]

    (tmp_path / "a.md").write_text("")
    loaded = comparison.load(file)
    assert [fault for _, fault in comparison.check_ours(loaded[1], tmp_path)] == ["no line has 'every schedule'"]
    for of, code in ((first, 0), (gone, 1)):
        file.write_text(DATA.replace("COMMIT", of))
        loaded = comparison.load(file)
        monkeypatch.setattr(comparison, "load", lambda loaded=loaded: loaded)
        monkeypatch.setattr(comparison, "pages", lambda *_: ())
        monkeypatch.setattr(comparison, "check_ours", lambda *_: ())
        monkeypatch.setattr(sys, "argv", ["comparison.py", "--check", str(bare.parent)])
        assert comparison.main() == code
        shown = capsys.readouterr()
        assert "src/pipe.py:3" in (shown.err if code else shown.out)
        monkeypatch.undo()
