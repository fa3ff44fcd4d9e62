"""Rows of configs/published that are used and rows that are only looked at once, at the end.

`python benchmarks/published_split.py` prints how many there are; `--draw` writes the list anew (before a planner is
worked on, never after). Scripts get their rows from :func:`used`; :func:`opened` gives the others, and only to a caller
that names an entry of ``openings.jsonl``, which is committed: who looks, when and at which commit of the planner.

Rows of one configuration stay together over all files, so that no release or program of a set-aside layout is used.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import io
import json
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from megatron_port.core.io.files import write_text

FOLDER = Path(__file__).resolve().parents[1] / "configs" / "published"
ASIDE = FOLDER / "aside.csv"
OPENINGS = FOLDER / "openings.jsonl"
FILES = ("points.csv", "points-moe.csv", "points-long.csv", "points2.csv", "mcore-memory.csv")
SEED = "megatron_port 2026-11-25"
SHARE = 0.1
SHAPE = ("layers", "hidden", "n_gpus", "tp", "pp", "cp", "ep", "seq", "global_batch")
NOT_ELIGIBLE = ("Dash", "DeepSeek-V3 report", "Llama 3", "Megatron-MoE-ModelZoo H100 long context")
"""Sources that a number was taken from, or that a goal names."""
COMPARED = ("points.csv", "points-moe.csv", "points-long.csv")
"""Files whose rows had been compared with a plan before the draw."""


@dataclass(frozen=True)
class Line:
    """A line of a file, counted from 2 as an editor does, and what it says."""

    file: str
    number: int
    row: dict[str, str]

    @property
    def digest(self) -> str:
        """Of the whole line: a list of numbers alone would not see that a file has changed."""
        return hashlib.sha256(json.dumps(self.row, sort_keys=True).encode()).hexdigest()[:16]

    @property
    def family(self) -> str:
        """Whose rows it is one of."""
        if self.file == "mcore-memory.csv":
            return "Megatron-core memory"
        return self.row.get("source_group") or " ".join(self.row["source"].split()[:2])

    @property
    def eligible(self) -> bool:
        """Whether it may be set aside."""
        return not self.row.get("source", "").startswith(NOT_ELIGIBLE)

    def marks(self) -> list[str]:
        """What it shares with other lines of the same configuration."""
        if self.file == "mcore-memory.csv":
            told = {"golden", "n_steps", "median_iter_s", "mem_alloc_GiB", "mem_max_alloc_GiB", "case"}
            return ["memory " + "|".join(v for k, v in self.row.items() if k not in told)]
        shape = "|".join(self.row.get(k) or "1" for k in SHAPE)
        release = self.row.get("config_key")
        return [f"shape {shape}", *([f"release {release}"] if release else [])]


def lines(files: Iterable[str] = FILES) -> list[Line]:
    """All lines of some files."""
    out = []
    for file in files:
        with (FOLDER / file).open(newline="") as f:
            out += [Line(file, number, row) for number, row in enumerate(csv.DictReader(f), 2)]
    return out


def configurations(found: list[Line]) -> list[list[Line]]:
    """Lines that share a key, directly or through others."""
    first: dict[str, int] = {}
    parent = list(range(len(found)))

    def root(i: int) -> int:
        while parent[i] != i:
            i = parent[i]
        return i

    for i, line in enumerate(found):
        for key in line.marks():
            parent[root(i)] = root(first.setdefault(key, i))
    out: dict[int, list[Line]] = defaultdict(list)
    for i, line in enumerate(found):
        out[root(i)].append(line)
    return list(out.values())


def draw() -> list[Line]:
    """A tenth of each family's lines, by a hash of what their configurations are."""
    groups = [g for g in configurations(lines()) if all(line.eligible for line in g)]
    def place(group: list[Line]) -> bytes:
        return hashlib.sha256("|".join([SEED, *sorted(k for x in group for k in x.marks())]).encode()).digest()

    groups.sort(key=place)
    count: dict[str, int] = defaultdict(int)
    taken: dict[str, int] = defaultdict(int)
    for line in lines():
        count[line.family] += 1
    out: list[Line] = []
    for group in groups:
        families = {line.family for line in group}
        if any(taken[f] < round(SHARE * count[f]) for f in families):
            out += group
            for line in group:
                taken[line.family] += 1
    return sorted(out, key=lambda line: (FILES.index(line.file), line.number))


def listed() -> dict[tuple[str, int], str]:
    """The committed list: (file, line) → digest."""
    with ASIDE.open(newline="") as f:
        return {(row["file"], int(row["line"])): row["digest"] for row in csv.DictReader(f)}


def _parted(file: str, aside: bool) -> list[Line]:
    known, out = listed(), []
    for line in lines([file]):
        digest = known.pop((file, line.number), None)
        if digest is not None and digest != line.digest:
            raise SystemExit(f"{file}, line {line.number} is set aside and has changed since; restore it")
        if (digest is not None) == aside:
            out.append(line)
    if lost := [number for name, number in known if name == file]:
        raise SystemExit(f"{file} has no lines {lost}, which are set aside; restore them")
    return out


def used(file: str) -> list[Line]:
    """The lines that a script may compare with, tune by and print."""
    return _parted(file, aside=False)


def opened(file: str, opening: str) -> list[Line]:
    """The lines set aside.

    Raises:
        SystemExit: no committed entry of openings.jsonl has this name.
    """
    entries = [json.loads(text) for text in OPENINGS.read_text().splitlines()] if OPENINGS.exists() else []
    if not any(entry["name"] == opening for entry in entries):
        raise SystemExit(
            f"{opening!r} is no entry of {OPENINGS.name}: set-aside rows are looked at once, when the planner is "
            "finished. Add a line with name, date, commit and why, commit it, and say in docs/planner.md what came out"
        )
    return _parted(file, aside=True)


def seen_before() -> set[tuple[str, int]]:
    """Set-aside lines whose configuration had been compared with a plan before the draw."""
    return {
        (line.file, line.number) for group in configurations(lines())
        if any(line.file in COMPARED for line in group) for line in group
    }


def main() -> None:
    """Print the counts, or draw."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--draw", action="store_true", help="write the list anew")
    args = parser.parse_args()
    if args.draw:
        text = io.StringIO()
        table = csv.writer(text, lineterminator="\n")
        table.writerow(["file", "line", "digest"])
        table.writerows([line.file, line.number, line.digest] for line in draw())
        write_text(ASIDE, text.getvalue())
    aside, seen = listed(), seen_before()
    for file in FILES:
        mine = [key for key in aside if key[0] == file]
        before = sum(k in seen for k in mine)
        print(f"{file}: {len(lines([file]))} rows, {len(mine)} set aside, of which {before} had been compared before")


if __name__ == "__main__":
    main()
