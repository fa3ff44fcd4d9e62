"""Which tree a row of a record in ``benchmarks/results`` was made by, and whether that still says something."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
NUMERICS = ("core", "ext")
"""Packages that decide what a step computes."""


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()


def commit() -> str:
    """Return the tree's commit, with + where it has changes; empty without git."""
    return _git("rev-parse", "--short=12", "HEAD") + ("+" if _git("status", "--porcelain", "-uno") else "")


def latest(path: Path, key: str) -> dict[Any, dict[str, Any]]:
    """Return the last row of each value of ``key`` in a file of JSON lines."""
    lines = path.read_text().splitlines() if path.exists() else []
    return {row[key]: row for row in map(json.loads, lines)}


def made_by(path: Path) -> str:
    """Return a sentence: the commits that made a record, and how far their numerics are from today's."""
    rows = latest(path, "seed").values()
    written = _git("log", "-1", "--format=%h", "--", str(path))  # rows that name no commit are from before 2026-11-28
    parts = []
    for name, count in Counter(str(row.get("commit") or written) for row in rows).most_common():
        changed = _git("diff", "--name-only", name.rstrip("+"), "HEAD", "--",
                       *(f"megatron_port/{folder}" for folder in NUMERICS)).split()
        parts.append(f"{count} rows by {name or 'an unknown commit'}, since which {len(changed)} files of the step's "
                     "packages have changed")
    return "; ".join(parts)


if __name__ == "__main__":
    for name in sys.argv[1:]:
        print(f"{name}: {made_by(Path(name))}")
