"""Does the suite see silent faults? Applies each of ``tests/mutants.toml`` to a copy of the tree and runs its tests.

    make mutations                                  all that the record lacks, or that has changed since
    make mutations ARGS='--only rope --again'       those whose name has the word, also where recorded
    make mutations ARGS=--report                    the record as a table, with what it no longer shows
    make mutations ARGS=--anchor                    state new faults, written as text, by attribute and syntax
    make mutations ARGS='--part today --jobs 2'     the tenth of the day, as CI does: all of them in ten days

A fault is *caught* when each of the named tests, run by itself, fails; *survived* when one of them passes. A copy that
does not even import, or a test that hangs, proves nothing and is an *error*; so that a failure means something, all
tests run first without a fault. Results are appended to ``benchmarks/results/mutations.jsonl``, each with a digest of
what it depends on: an interrupted run resumes, and ``--report`` tells rows of this tree from rows of older ones.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import contextlib
import hashlib
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    import tomli as tomllib  # type: ignore[no-redef]

from commands import Commands, Program
from mutant_anchors import Anchor, anchor, replaced

ROOT = Path(__file__).resolve().parents[1]
TEMPORARY = re.compile(r"(?:/\S*/pytest-of-[^/]+/pytest-\d+|" + re.escape(tempfile.gettempdir()) + r"/[\w.-]+)")
"""A temporary folder in a message, of pytest or of a test."""
LIST = Path(__file__).with_suffix(".toml")
RECORD = ROOT / "benchmarks" / "results" / "mutations.jsonl"
LIMIT_S = 420
"""Of one pytest run; a fault that hangs is caught by nobody."""
CAUGHT, SURVIVED, ERROR = "caught", "survived", "error"


@dataclass(frozen=True)
class Mutant:
    """One fault: ``old`` becomes ``new`` in ``file``, and each of ``tests`` (pytest's names) must then fail."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    at: str | None = None
    """Attribute of a Python file inside which ``old`` is found by syntax; None: ``old`` is found as text."""
    nth: int = 0
    """Which of several places, from 1; 0: there is only one."""

    def applied(self, text: str) -> str:
        """The file with the fault. Raises ValueError unless ``old`` is there exactly once, or ``nth`` says which."""
        if self.at is not None:
            try:
                return replaced(text, Anchor(self.at, self.old, self.new, self.nth))
            except ValueError as e:
                raise ValueError(f"{self.name}: in {self.file}, {e}") from e
        if text.count(self.old) != 1:
            raise ValueError(f"{self.name}: {self.old!r} is {text.count(self.old)} times in {self.file}")
        return text.replace(self.old, self.new)

    def digest(self, tree: Path = ROOT) -> str:
        """Of all that decides the outcome as far as files say: the fault, its file, the tests' files and the twin."""
        files = {tree / self.file, *(tree / t.split("::")[0] for t in self.tests), *(tree / "tests/twin").glob("*.py")}
        h = hashlib.blake2b(digest_size=8)
        place = () if self.at is None else (self.at, str(self.nth))
        for part in (*place, self.old, self.new, *self.tests, *(f.read_text() for f in sorted(files))):
            h.update(part.encode() + b"\0")
        return h.hexdigest()


def load(path: Path = LIST) -> list[Mutant]:
    """The list. Raises KeyError for a test that has no name in it."""
    raw: dict[str, Any] = tomllib.loads(path.read_text())
    return [
        Mutant(**{**m, "tests": tuple(raw["tests"][t] for t in m["tests"])}) for m in raw["mutant"]
    ]


def quoted(text: str) -> str:
    """TOML that reads as ``text``."""
    if "\n" in text and "'''" not in text:
        return f"'''\n{text}'''"
    return f"'{text}'" if '"' in text and "'" not in text and "\n" not in text else json.dumps(text, ensure_ascii=False)


def anchored(listed: str, tree: Path = ROOT) -> str:
    """The list with ``at`` for each fault of a Python file that quotes its text."""
    head, *entries = re.split(r"(?m)^(?=\[\[mutant\]\]$)", listed)
    out = [head]
    for entry in entries:
        (raw,) = tomllib.loads(entry)["mutant"]
        if raw["file"].endswith(".py") and "at" not in raw:
            before = (tree / raw["file"]).read_text()
            place = anchor(before, Mutant(**raw).applied(before))
            fields = {"at": place.at, "old": place.old, "new": place.new}
            lines = [f"{key} = {quoted(value)}" for key, value in fields.items()]
            lines += [f"nth = {place.nth}"] if place.nth else []
            start, end = entry.index("\nold = ") + 1, entry.index("\ntests = ")
            entry = entry[:start] + "\n".join(lines) + entry[end:]
        out.append(entry)
    return "".join(out)


@contextlib.contextmanager
def copied_tree() -> Iterator[Path]:
    """What git knows or does not ignore, and the compiled kernels, in a folder of its own."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=ROOT, check=True,
        capture_output=True,
    ).stdout.decode().split("\0")
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        tree = Path(folder) / "tree"
        for name in filter(None, listed):
            source = ROOT / name
            if name == ".venv" or not (source.is_symlink() or source.is_file()):
                continue
            target = tree / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target, follow_symlinks=False)
        kernels = ROOT / "megatron_port" / "_kernels"
        here = tree / "megatron_port" / "_kernels"
        if kernels.exists() and not here.exists():
            shutil.copytree(kernels, here)  # not a link: a fault in a kernel's source is compiled into it
        yield tree


@dataclass(frozen=True)
class Ran:
    """One pytest run."""

    code: int
    failed: tuple[str, ...]
    why: str
    """What the first failed test said, in a line."""
    tail: str


PYTEST = Program(("torch", "torch.distributed", "numpy", "hypothesis", "pytest"), "pytest", "main")
"""Imports nothing of the package: each run takes that from the tree that it tests."""


@contextlib.contextmanager
def pytest_server() -> Iterator[Commands]:
    """Forks pytest runs."""
    # Without bytecode: a fault of the same length in the same second would run as the old file.
    unwritten = {"PYTHONDONTWRITEBYTECODE": "1", "SLOW": "1", "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory(prefix="mutants-") as logs, Commands(Path(logs), PYTEST, unwritten) as server:
        yield server


def run_tests(server: Commands, tree: Path, tests: Sequence[str], limit_s: float = LIMIT_S) -> Ran:
    """``pytest -x TESTS`` in ``tree``; code -1: it took longer than ``limit_s`` and was killed with all it started."""
    command = server.start("-x", "-q", "-p", "no:cacheprovider", "-p", "no:randomly", *tests, cwd=tree,
                           env={"PYTHONPATH": str(tree)})
    try:
        code = command.wait(limit_s)
    except AssertionError:
        code = -1
    finally:
        command.end()
    output = command.output()
    said = re.search(r"^E +(\S.*)$", output, re.M)
    failed = tuple(re.findall(r"^FAILED (\S+)", output, re.M))
    return Ran(code, failed, said.group(1)[:200] if said else "", output[-3000:])


def portable(text: str) -> str:
    """Return a text without the folders of this machine: temporary ones, the interpreter's, the repository."""
    for folder, name in ((sys.prefix, "VENV"), (sys.base_prefix, "PYTHON"), (str(ROOT), ".")):
        text = text.replace(folder, name)
    return TEMPORARY.sub("TMP", text)  # after the repository, which may be in one


def judge(server: Commands, tree: Path, mutant: Mutant) -> dict[str, Any]:
    """Apply, run each named test by itself, take back. The outcome is that of the least of them."""
    path = tree / mutant.file
    before = path.read_text()
    started = time.monotonic()
    by_test: dict[str, str] = {}
    failed: list[str] = []
    why: list[str] = []
    tail = ""
    path.write_text(mutant.applied(before))
    try:
        for test in mutant.tests:
            ran = run_tests(server, tree, [test])
            # 1: tests failed; 0: none did; all else (no tests, an error in importing them, a hang) proves nothing.
            by_test[test] = {0: SURVIVED, 1: CAUGHT if ran.failed else ERROR}.get(ran.code, ERROR)
            failed += ran.failed
            why += [portable(ran.why)] if ran.failed else []
            tail = portable(ran.tail) if by_test[test] == ERROR else tail
    finally:
        path.write_text(before)
    outcome = next(o for o in (ERROR, SURVIVED, CAUGHT) if o in by_test.values())
    row = {"name": mutant.name, "outcome": outcome, "file": mutant.file, "old": mutant.old.strip(),
           "new": mutant.new.strip(), "failed": failed, "why": why,
           "seconds": round(time.monotonic() - started, 1)}
    if outcome != CAUGHT:
        row["by_test"] = by_test
    return row | ({"tail": tail} if tail else {})


def recorded(path: Path) -> dict[str, dict[str, Any]]:
    """Name → its latest row."""
    lines = path.read_text().splitlines() if path.exists() else []
    return {row["name"]: row for row in map(json.loads, lines)}


def append(path: Path, row: dict[str, Any]) -> None:
    """One line, on disk before the next fault is tried."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as out:
        out.write(json.dumps(row) + "\n")
        out.flush()
        os.fsync(out.fileno())


def age(mutant: Mutant, row: dict[str, Any] | None) -> str:
    """What the record shows of this tree: ``today``, ``older (COMMIT)`` or ``none``."""
    if row is None:
        return "none"
    return "today" if row.get("digest") == mutant.digest() else f"older ({row.get('commit', 'unknown')})"


def table(mutants: Sequence[Mutant], rows: Mapping[str, dict[str, Any]]) -> str:
    """Fault → what caught it, and whether the fault's file and its tests are still those of that run, as Markdown."""
    lines = ["| fault | file | outcome | by | record |", "|---|---|---|---|---|"]
    ages = {m.name: age(m, rows.get(m.name)) for m in mutants}
    for mutant in mutants:
        row = rows.get(mutant.name, {"outcome": "not tried", "failed": []})
        by = ", ".join(f"`{t.removeprefix('tests/')}`" for t in row["failed"]) or "nothing"
        lines.append(f"| {mutant.name} | `{mutant.file}` | {row['outcome']} | {by} | {ages[mutant.name]} |")
    counts = collections.Counter(text.partition(" ")[0] for text in ages.values())
    return "\n".join([
        *lines, "",
        f"{len(mutants)} faults: {counts['today']} rows are of this tree (the fault's file and its tests unchanged), "
        f"{counts['older']} of older trees and show nothing of this one, {counts['none']} have none. "
        "`make mutations` tries the last two kinds."])


PARTS = 10


def part_of(name: str) -> int:
    """The part (0 to 9) that a fault belongs to, whatever else is in the list."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=4).digest(), "big") % PARTS


def commit() -> str:
    """Of the tree, with + where it has changes."""
    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()

    return git("rev-parse", "--short=12", "HEAD") + ("+" if git("status", "--porcelain", "-uno") else "")


def commit_day() -> int:
    """Days since 1970 of the commit, so that a commit always has the same part; today's without git."""
    stamp = subprocess.run(["git", "log", "-1", "--format=%ct"], cwd=ROOT, capture_output=True, text=True, check=False)
    return int(stamp.stdout or time.time()) // 86400


def tree_digest(tree: Path) -> str:
    """Of the package and the tests."""
    h = hashlib.blake2b(digest_size=8)
    for path in sorted(p for folder in ("megatron_port", "tests") for p in (tree / folder).rglob("*.py")):
        h.update(str(path.relative_to(tree)).encode() + b"\0" + path.read_bytes())
    return h.hexdigest()


def pass_without_fault(server: Commands, tree: Path, tests: Sequence[str], record: Path) -> bool:
    """Run the tests as they are, unless that is on record for this very tree: else a failure says nothing."""
    digest, name = tree_digest(tree), "no fault"
    known = recorded(record).get(name, {})
    passed = set(known.get("passed", ())) if known.get("digest") == digest else set()
    todo = sorted(set(tests) - passed)
    if not todo:
        return True
    started = time.monotonic()
    clean = run_tests(server, tree, todo, LIMIT_S * len(todo))
    if clean.code != 0:
        print(f"the tests fail without a fault:\n{clean.tail}")
        return False
    append(record, {"name": name, "outcome": "passed", "passed": sorted({*passed, *todo}), "commit": commit(),
                    "seconds": round(time.monotonic() - started, 1), "digest": digest, "time": round(time.time())})
    return True


def run(mutants: Sequence[Mutant], record: Path, jobs: int = 1) -> int:
    """Run them all, ``jobs`` at a time, each in a tree of its own.

    Returns:
        0: every one was caught; 1: one survived; 2: the tests fail without a fault, or a fault proved nothing.
    """
    waiting, lock, done = collections.deque(mutants), threading.Lock(), itertools.count(1)
    bad: list[tuple[str, str]] = []

    def work(server: Commands, tree: Path) -> None:
        while True:
            with lock:
                if not waiting:
                    return
                mutant = waiting.popleft()
            row = {**judge(server, tree, mutant), "commit": commit(), "digest": mutant.digest(tree),
                   "time": round(time.time())}
            with lock:
                append(record, row)
                place = f"{next(done)}/{len(mutants)}"
                print(f"{place} {row['outcome']:8} {row['seconds']:6.1f} s  {mutant.name}", flush=True)
                if row["outcome"] != CAUGHT:
                    bad.append((row["outcome"], mutant.name))
                    print(json.dumps(row.get("by_test")), row.get("tail", ""), sep="\n", flush=True)

    with contextlib.ExitStack() as stack:
        pairs = [(stack.enter_context(pytest_server()), stack.enter_context(copied_tree())) for _ in range(jobs)]
        if not pass_without_fault(*pairs[0], [t for m in mutants for t in m.tests], record):
            return 2
        with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
            for future in [pool.submit(work, *pair) for pair in pairs]:
                future.result()
    for outcome, name in bad:
        print(f"{outcome}: {name}")
    print(f"{len(mutants) - len(bad)} of {len(mutants)} faults were caught")
    return 0 if not bad else 1 if SURVIVED in dict(bad) else 2


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=[""], nargs="+", metavar="WORD", help="faults whose name or file has a word")
    parser.add_argument("--again", action="store_true", help="also those that are recorded and have not changed")
    parser.add_argument("--part", choices=["today", *map(str, range(PARTS))], help="a tenth; today: the commit's day")
    parser.add_argument("--jobs", type=int, default=1, help="faults tried at a time")
    parser.add_argument("--report", action="store_true", help="print the record and stop")
    parser.add_argument("--anchor", action="store_true", help="rewrite the list: find faults by syntax, not by text")
    parser.add_argument("--record", type=Path, default=RECORD)
    args = parser.parse_args()
    if args.anchor:
        LIST.write_text(anchored(LIST.read_text()))
        return 0
    mutants, done = load(), recorded(args.record)
    if args.report:
        print(table(mutants, done))
        return 0
    if args.part is not None:
        part = commit_day() % PARTS if args.part == "today" else int(args.part)
        mutants = [m for m in mutants if part_of(m.name) == part]
        print(f"part {part} of {PARTS}")
    todo = [
        m for m in mutants if any(word in m.name or word in m.file for word in args.only) and (
            args.again or done.get(m.name, {}).get("digest") != m.digest() or done[m.name]["outcome"] != CAUGHT
        )
    ]
    print(f"{len(todo)} of {len(mutants)} faults to try", flush=True)
    return run(todo, args.record, args.jobs) if todo else 0


if __name__ == "__main__":
    sys.exit(main())
