"""The list of faults fits the tree, and the runner tells caught from survived from broken."""

from __future__ import annotations

import ast
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import mutants
import pytest
from commands import Commands
from mutant_anchors import parsed, same
from mutants import CAUGHT, ERROR, SURVIVED, Mutant

ROOT = Path(__file__).resolve().parents[2]
LIST = mutants.load()
CHEAP = (
    "a group leaves out all but the first factor of its axes",
    "a resumed run forgets its good steps",
    "a replica's micro-batches are neighbours",
)
"""Faults whose test takes a second or two: the runner works. CI tries a tenth of all in every run."""


def test_names_are_unique_and_there_are_many() -> None:
    assert len({m.name for m in LIST}) == len(LIST) >= 90


def test_a_record_names_no_folder_of_a_machine() -> None:
    """Nor has the committed one any."""
    said = f"OffloadConfig(nvme_path='{tempfile.gettempdir()}/tmp982a82sx') at {ROOT}/tests/x.py, {sys.prefix}/lib"
    assert mutants.portable(said) == "OffloadConfig(nvme_path='TMP') at ./tests/x.py, VENV/lib"
    found = re.findall(r"/(?:tmp/tmp|(?:root|home)/)[^\"]{0,40}", mutants.RECORD.read_text())
    assert not found, found[:3]


@pytest.fixture(scope="module")
def copy() -> Iterator[Path]:
    """The tree without git's ignored files, to be broken."""
    if not (ROOT / ".git").exists():
        pytest.skip("the copy is made of what git lists")
    with mutants.copied_tree() as folder:
        yield folder


@pytest.fixture(scope="module")
def server() -> Iterator[Commands]:
    with mutants.pytest_server() as server:
        yield server


@pytest.mark.parametrize("name", CHEAP)
def test_a_silent_fault_is_caught(server: Commands, copy: Path, name: str) -> None:
    """By its test, which passes without the fault in the same ``make test``."""
    (mutant,) = (m for m in LIST if m.name == name)
    row = mutants.judge(server, copy, mutant)
    assert row["outcome"] == CAUGHT, row


@pytest.mark.parametrize("mutant", LIST, ids=lambda m: m.name)
def test_a_fault_fits_its_file(mutant: Mutant) -> None:
    """Where a file has changed, so must the list."""
    before = (ROOT / mutant.file).read_text()
    after = mutant.applied(before)
    assert mutant.at is not None or not mutant.file.endswith(".py"), "make mutations ARGS=--anchor restates it"
    assert not same(parsed(before), ast.parse(after)) if mutant.file.endswith(".py") else before != after
    for test in mutant.tests:
        file, _, name = test.partition("::")
        assert name.partition("[")[0] in (ROOT / file).read_text(), test


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    (tmp_path / "thing.py").write_text("def double(x):\n    return x + x\n")
    (tmp_path / "test_thing.py").write_text("import thing\n\ndef test_double():\n    assert thing.double(2) == 4\n")
    return tmp_path


@pytest.mark.parametrize(
    ("new", "outcome"), [("x + x + x", CAUGHT), ("x * x", SURVIVED), ("(x +", ERROR)],
)
def test_outcomes(server: Commands, tree: Path, new: str, outcome: str) -> None:
    before = (tree / "thing.py").read_text()
    row = mutants.judge(server, tree, Mutant("one", "thing.py", "x + x", new, ("test_thing.py",)))
    assert row["outcome"] == outcome
    assert row["failed"] == (["test_thing.py::test_double"] if outcome == CAUGHT else [])
    assert row["why"] == (["assert 6 == 4"] if outcome == CAUGHT else [])
    assert (tree / "thing.py").read_text() == before


def test_text_that_is_not_there_once_is_refused() -> None:
    for old in ("y", "x"):
        with pytest.raises(ValueError, match=r"is \d times in f"):
            Mutant("m", "f", old, "z", ()).applied("x x")


def test_the_record_is_what_the_latest_run_said(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    for outcome in (SURVIVED, CAUGHT):
        mutants.append(path, {"name": "a", "outcome": outcome, "file": "f", "failed": ["tests/unit/t.py::x"]})
    assert mutants.recorded(path)["a"]["outcome"] == CAUGHT


def test_the_report_tells_rows_of_this_tree_from_older_ones() -> None:
    today, older, none = LIST[:3]
    rows = {today.name: {"outcome": CAUGHT, "failed": ["tests/unit/t.py::x"], "digest": today.digest()},
            older.name: {"outcome": CAUGHT, "failed": [], "digest": "another", "commit": "abc"}}
    text = mutants.table([today, older, none], rows)
    assert f"| {today.name} | `{today.file}` | caught | `unit/t.py::x` | today |" in text
    assert "| caught | nothing | older (abc) |" in text and "| not tried | nothing | none |" in text
    assert "3 faults: 1 rows are of this tree" in text


def test_ten_parts_hold_every_fault_once_and_are_of_a_size() -> None:
    sizes = [sum(mutants.part_of(m.name) == part for m in LIST) for part in range(mutants.PARTS)]
    assert sum(sizes) == len(LIST) and max(sizes) < 2 * len(LIST) / mutants.PARTS
