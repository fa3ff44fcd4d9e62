"""Check what the pages say of other systems against their files, and write the tables.

    python scripts/comparison.py --check FOLDER    # clones of the systems, bare or not, anywhere in the folder
    python scripts/comparison.py --write           # the tables of benchmarks/evidence/comparison.md and README.md

``docs/comparison.toml`` has each cell with its evidence: a path, a line, and a text that must be on that line at the
named commit. A cell that claims an absence has words instead, and the paths where they must not occur. ``--check``
prints ``path:line`` of each text, then all that does not stand, and exits 1 if there is any. Without an option both
pages are compared with the file.

To take a newer commit of a system, put it into the file, fetch it into the clone, and run ``--check``: the list names
the cells to read again.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT / "docs" / "comparison.toml"
OURS = "ours"


@dataclass(frozen=True)
class Project:
    """Another system, at one commit. ``column``: its heading in README, where it has none if empty."""

    key: str
    name: str
    url: str
    commit: str
    date: str
    column: str


@dataclass(frozen=True)
class Evidence:
    """A text on a line of a file; line 0: anywhere in the file."""

    path: str
    line: int
    text: str


@dataclass(frozen=True)
class Cell:
    """What is said of one system in one row. ``words`` occur nowhere in ``paths``."""

    text: str
    readme: str
    evidence: tuple[Evidence, ...]
    words: tuple[str, ...]
    paths: tuple[str, ...]


@dataclass(frozen=True)
class Row:
    title: str
    in_readme: bool
    cells: dict[str, Cell]


def read_cell(entry: dict[str, Any]) -> Cell:
    searched = entry.get("searched", {})
    return Cell(entry["text"], entry.get("readme", entry["text"]),
                tuple(Evidence(e["path"], e.get("line", 0), e["text"]) for e in entry.get("evidence", ())),
                tuple(searched.get("words", ())), tuple(searched.get("paths", ())))


def load(path: Path = DATA) -> tuple[list[Project], list[Row]]:
    """Return the systems and the rows. Raises ValueError for a cell that is missing or has nothing behind it."""
    with path.open("rb") as file:
        data = tomllib.load(file)
    projects = [Project(p["key"], p["name"], p["url"], p["commit"], str(p["date"]), p.get("column", ""))
                for p in data["project"]]
    rows = [Row(r["title"], r.get("in_readme", True), {key: read_cell(c) for key, c in r["cells"].items()})
            for r in data["row"]]
    wanted = {OURS, *(p.key for p in projects)}
    for row in rows:
        if set(row.cells) != wanted:
            raise ValueError(f"row {row.title!r}: cells for {sorted(row.cells)}, wanted are {sorted(wanted)}")
        for key, cell in row.cells.items():
            if bool(cell.words) != bool(cell.paths) or not (cell.evidence or cell.words):
                raise ValueError(f"row {row.title!r}, {key}: wants evidence, or searched words and paths")
            if key != OURS and any(e.line < 1 for e in cell.evidence):
                raise ValueError(f"row {row.title!r}, {key}: evidence without a line")
    return projects, rows


# --- the check ---------------------------------------------------------------------------------------------------


def git(repository: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run git in exactly this repository, never in one that contains it."""
    folder = repository / ".git" if (repository / ".git").exists() else repository
    return subprocess.run(["git", "--git-dir", str(folder), *arguments], capture_output=True, text=True,
                          encoding="utf-8", errors="replace", check=False)


def clones(folder: Path) -> list[Path]:
    """Every repository in the folder, up to three levels down."""
    found = [folder / ".git", *(p for depth in ("*", "*/*", "*/*/*") for p in folder.glob(f"{depth}/HEAD"))]
    return sorted({path.parent for path in found if path.exists() and path.parent.name != ".git"}
                  | {path.parent for depth in ("*", "*/*") for path in folder.glob(f"{depth}/.git")})


def clone_of(project: Project, repositories: list[Path]) -> Path | None:
    """The first repository that has the commit."""
    wanted = project.commit + "^{commit}"
    return next((r for r in repositories if git(r, "cat-file", "-e", wanted).returncode == 0), None)


def check_evidence(repository: Path, commit: str, evidence: Evidence) -> str:
    """Return what is wrong with a piece of evidence, or an empty text."""
    shown = git(repository, "show", f"{commit}:{evidence.path}")
    if shown.returncode:
        return "no such file"
    # Lines as git and GitHub count them: str.splitlines also splits at form feeds.
    lines = [number for number, line in enumerate(shown.stdout.split("\n"), 1) if evidence.text in line]
    if not lines:
        return f"no line has {evidence.text!r}"
    return "" if evidence.line in lines else f"{evidence.text!r} is on line {lines[0]}"


def check_search(repository: Path, commit: str, cell: Cell) -> str:
    """Return the first lines that have one of a cell's words, or an empty text."""
    for path in cell.paths:
        if git(repository, "cat-file", "-e", f"{commit}:{path}").returncode:
            return f"no such file or folder: {path}"
    words = [option for word in cell.words for option in ("-e", word)]
    found = git(repository, "grep", "-n", "-I", "-i", "-F", *words, commit, "--", *cell.paths)
    if found.returncode > 1 or (found.stderr and not found.stdout):
        return f"git grep failed: {found.stderr.strip()[:200]}"
    hits = [line.removeprefix(commit + ":")[:120] for line in found.stdout.splitlines()]
    return f"{len(hits)} lines have one of the words: {'; '.join(hits[:3])}" if hits else ""


def check(projects: list[Project], rows: list[Row], folder: Path) -> Iterator[tuple[str, str]]:
    """``(place, fault)`` of every text and search; an empty fault: it stands."""
    repositories = clones(folder)
    for project in projects:
        repository = clone_of(project, repositories)
        if repository is None:
            yield project.name, f"no clone in {folder} has commit {project.commit}; git fetch origin {project.commit}"
            continue
        for row in rows:
            cell = row.cells[project.key]
            for evidence in cell.evidence:
                place = f"{project.name} {evidence.path}:{evidence.line} ({row.title})"
                yield place, check_evidence(repository, project.commit, evidence)
            if cell.words:
                place = f"{project.name} {' '.join(cell.paths)}: none of {', '.join(cell.words)} ({row.title})"
                yield place, check_search(repository, project.commit, cell)


def check_ours(rows: list[Row], root: Path = ROOT) -> Iterator[tuple[str, str]]:
    """The same of this project's own cells: the text is in the file, wherever."""
    for row in rows:
        for evidence in row.cells[OURS].evidence:
            path = root / evidence.path
            stands = path.is_file() and evidence.text in path.read_text(encoding="utf-8")
            yield f"here {evidence.path} ({row.title})", "" if stands else f"no line has {evidence.text!r}"


# --- the tables --------------------------------------------------------------------------------------------------


def line_of(cells: list[str]) -> str:
    """One line of a table; an empty cell takes one space."""
    return "|" + "|".join(f" {cell} " if cell else " " for cell in cells) + "|\n"


def table(head: list[str], rows: list[list[str]]) -> str:
    return line_of(head) + "|" + "---|" * len(head) + "\n" + "".join(map(line_of, rows))


def places(project: Project, cell: Cell) -> str:
    """Links to a cell's lines at the commit, and the words that were searched."""
    parts = []
    for evidence in cell.evidence:
        plain = "?plain=1" if evidence.path.endswith(".md") else ""  # without it GitHub renders the page, without lines
        address = f"{project.url}/blob/{project.commit}/{evidence.path}{plain}#L{evidence.line}"
        parts.append(f"[`{evidence.path}:{evidence.line}`]({address})")
    if cell.words:
        parts.append("searched: " + ", ".join(f"`{word}`" for word in cell.words)
                     + " in " + ", ".join(f"`{path}`" for path in cell.paths))
    return "; ".join(parts)


def ours_of(cell: Cell) -> str:
    """This project's cell for a page in benchmarks/evidence/."""
    return cell.text.replace("](docs/", "](../../docs/").replace("](benchmarks/evidence/", "](")


def projects_table(projects: list[Project]) -> str:
    return table(["system", "commit", "date"],
                 [[f"[{p.name}]({p.url})", f"[`{p.commit[:12]}`]({p.url}/tree/{p.commit})", p.date] for p in projects])


def rows_tables(projects: list[Project], rows: list[Row]) -> str:
    """A section for each row: every system, what is said, and where it stands."""
    parts = []
    for row in rows:
        ours = row.cells[OURS]
        files = ", ".join(f"`{path}`" for path in dict.fromkeys(e.path for e in ours.evidence))
        lines = [["this project", ours_of(ours), files]]
        lines += [[p.name, row.cells[p.key].text, places(p, row.cells[p.key])] for p in projects]
        parts.append(f"### {row.title[0].upper()}{row.title[1:]}\n\n" + table(["system", "cell", "where"], lines))
    return "\n".join(parts)


def readme_table(projects: list[Project], rows: list[Row]) -> str:
    """The short table, for the systems that have a column."""
    shown = [p for p in projects if p.column]
    return table(["", "this project", *(p.column for p in shown)],
                 [[row.title, row.cells[OURS].readme, *(row.cells[p.key].readme for p in shown)]
                  for row in rows if row.in_readme])


def pages(projects: list[Project], rows: list[Row], root: Path = ROOT) -> Iterator[tuple[Path, str, str]]:
    """``(path, text, wanted text)`` of each page that has tables of the file."""
    blocks = {
        "benchmarks/evidence/comparison.md": {"systems": projects_table(projects), "rows": rows_tables(projects, rows)},
        "README.md": {"comparison": readme_table(projects, rows)},
    }
    for name, tables in blocks.items():
        path = root / name
        text = wanted = path.read_text(encoding="utf-8")
        for marker, content in tables.items():
            begin, end = f"<!-- {marker}: begin -->\n", f"<!-- {marker}: end -->"
            if wanted.count(begin) != 1 or wanted.count(end) != 1:
                raise ValueError(f"{name} wants one {begin.strip()} and one {end}")
            wanted = wanted[:wanted.index(begin)] + begin + content + wanted[wanted.index(end):]
        yield path, text, wanted


def main() -> int:
    parser = argparse.ArgumentParser(description="check the comparison with other systems, and write its tables")
    parser.add_argument("--check", type=Path, metavar="FOLDER", help="look every cell up in clones of the systems")
    parser.add_argument("--write", action="store_true", help="write the tables of evidence/comparison.md and README.md")
    asked = parser.parse_args()
    try:
        projects, rows = load()
        found = list(check_ours(rows)) + (list(check(projects, rows, asked.check)) if asked.check else [])
        for path, text, wanted in pages(projects, rows):
            if asked.write:
                path.write_text(wanted, encoding="utf-8")
            elif text != wanted:
                found.append((path.name, "not what the file gives: python scripts/comparison.py --write"))
    except (OSError, ValueError, KeyError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    faults = [f"{place}: {fault}" for place, fault in found if fault]
    print("\n".join(place for place, fault in found if not fault))
    print(f"{len(found) - len(faults)} stand, {len(faults)} do not")
    print("\n".join(faults), end="\n" if faults else "", file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
