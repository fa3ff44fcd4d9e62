"""Planted faults are found by attribute and syntax, wherever they stand and however they are laid out."""

from __future__ import annotations

import ast

import mutants
import pytest
from mutant_anchors import Anchor, anchor, replaced

SOURCE = '''\
LIMIT = 3
other = LIMIT + 1


class Thing:
    size = 4  # ü: columns are counted in bytes

    @property
    def double(self):
        """Twice."""
        return self.size * 2

    def scaled(self, by=1.0, *, floor=None):
        if by > 1:
            out = self.size * by
        elif by == 1:
            return self.size
        else:
            out = 0
        total = sum(
            x
            for x in (out, self.size * 2)
        )
        log(total, level=1, to="é")
        log(out)
        return total


def scaled(x):
    def inner(y):
        return y * 2
    log(x); return inner(x) * 2
'''

CASES = {
    "an expression": (Anchor("Thing.double", "self.size * 2", "self.size"), "return self.size * 2", "return self.size"),
    "a constant": (Anchor("LIMIT", "3", "4"), "LIMIT = 3", "LIMIT = 4"),
    "a constant of a class": (Anchor("Thing.size", "4", "-4"), "size = 4", "size = -4"),
    "operators keep their order": (Anchor("scaled", "inner(x)", "x + 1"), "inner(x) * 2", "(x + 1) * 2"),
    "another layout": (Anchor("Thing", "sum(x for x in (out, self.size * 2))", "0"),
                       "sum(\n            x\n            for x in (out, self.size * 2)\n        )", "0"),
    "what stands behind letters of two bytes": (Anchor("Thing.scaled", '"é"', '"e"'), '"é"', '"e"'),
    "a statement": (Anchor("Thing.scaled", "out = 0", "out = 1\nlog(1)"), "out = 0", "out = 1\n            log(1)"),
    "a statement taken out": (Anchor("Thing.scaled", "log(out)", ""), "        log(out)\n", ""),
    "all of a block taken out": (Anchor("Thing.scaled", "out = 0", ""), "out = 0", "pass"),
    "two statements": (Anchor("Thing", "log(out)\nreturn total", "return total"), "        log(out)\n", ""),
    "a decorated function": (
        Anchor("Thing", "@property\ndef double(self):\n    '''Twice.'''\n    return self.size * 2", "double = 8"),
        '@property\n    def double(self):\n        """Twice."""\n        return self.size * 2', "double = 8",
    ),
    "a signature": (
        Anchor("Thing.scaled", "def scaled(self, by=1.0, *, floor=None): ...", "def scaled(self, by=2.0): ..."),
        "by=1.0, *, floor=None", "by=2.0",
    ),
    "a condition": (Anchor("Thing.scaled", "if by > 1: ...", "if by >= 1: ..."), "if by > 1", "if by >= 1"),
    "a second condition": (Anchor("Thing.scaled", "if by == 1: ...", "if by == 2: ..."), "by == 1", "by == 2"),
    "arguments": (Anchor("Thing.scaled", "level=1,", "level=2,"), "level=1", "level=2"),
    "items": (Anchor("Thing.scaled", "out, self.size * 2,", "out,"), "(out, self.size * 2)", "(out)"),
    "the second of two": (Anchor("Thing", "self.size * 2", "0", nth=2), "(out, self.size * 2)", "(out, 0)"),
    "an inner function": (Anchor("scaled.inner", "y * 2", "y"), "return y * 2", "return y"),
    "one of two on a line": (Anchor("scaled", "log(x)", "log(y)"), "log(x)", "log(y)"),
}


@pytest.mark.parametrize("case", CASES)
def test_a_fault_is_put_where_it_belongs(case: str) -> None:
    place, old, new = CASES[case]
    assert SOURCE.count(old) == 1
    assert ast.dump(ast.parse(replaced(SOURCE, place))) == ast.dump(ast.parse(SOURCE.replace(old, new)))


def test_all_else_of_the_file_is_left_as_it_is() -> None:
    assert replaced(SOURCE, Anchor("scaled", "inner(x)", "x")) == SOURCE.replace("inner(x)", "(x)")


@pytest.mark.parametrize(("place", "message"), [
    (Anchor("Thing.triple", "x", "y"), "there is no 'Thing.triple'"),
    (Anchor("scaled.inner.y", "y", "x"), "there is no"),
    (Anchor("Thing", "self.size * 2", "0"), "is 2 times in 'Thing'"),
    (Anchor("Thing", "self.size * 2", "0", nth=3), "is 2 times"),
    (Anchor("Thing", "self.size * 5", "0"), "is 0 times"),
    (Anchor("Thing.size", "self.size * 2", "0"), "is 0 times"),
    (Anchor("", "return total", "return 0", nth=2), "is 1 times in 'the file'"),
    (Anchor("Thing", "a, b=1,", ""), "neither a program nor arguments"),
])
def test_no_place_or_several_are_refused(place: Anchor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replaced(SOURCE, place)


@pytest.mark.parametrize(("old", "new", "expected"), [
    ("size * by", "size / by", Anchor("Thing.scaled", "self.size * by", "self.size / by")),
    ("LIMIT = 3", "LIMIT = 5", Anchor("", "LIMIT = 3\nother = LIMIT + 1", "LIMIT = 5\nother = LIMIT + 1")),
    ("out = 0", "pass", Anchor("Thing.scaled", "out = 0", "pass")),
    ("\n        log(out)\n", "\n", Anchor("Thing.scaled", 'log(total, level=1, to="é")\nlog(out)',
                                         'log(total, level=1, to="é")')),
    ("return y * 2", "return y", Anchor("scaled.inner", "return y * 2", "return y")),
    ("floor=None", "floor=0", Anchor("Thing.scaled", "def scaled(self, by=1.0, *, floor=None): ...",
                                     "def scaled(self, by=1.0, *, floor=0): ...")),
])
def test_a_change_of_the_text_is_restated(old: str, new: str, expected: Anchor) -> None:
    after = SOURCE.replace(old, new)
    found = anchor(SOURCE, after)
    assert ast.dump(ast.parse(replaced(SOURCE, found))) == ast.dump(ast.parse(after))
    assert found == expected


def test_a_listed_fault_is_restated_and_the_others_are_kept(tmp_path) -> None:
    (tmp_path / "thing.py").write_text(SOURCE)
    listed = '''[tests]
t = "t.py"

[[mutant]]
name = "one"
file = "thing.py"
old = "if by > 1:"
new = "if by > 0:"
tests = ["t"]

# ---------------- others

[[mutant]]
name = "two"
file = "thing.cu"
old = "by > 1"
new = "by > 0"
tests = ["t"]
'''
    found = mutants.anchored(listed, tmp_path)
    assert found == listed.replace('old = "if by > 1:"\nnew = "if by > 0:"',
                                   'at = "Thing.scaled"\nold = "if by > 1: ..."\nnew = "if by > 0: ..."')
    assert mutants.anchored(found, tmp_path) == found


@pytest.mark.parametrize("text", [
    "plain", 'a "quoted" text', "it's", "\"both\" and 'these'", "two\nlines", "a\n'''b'''\\n", "é \\",
])
def test_quoted_text_is_read_back(text: str) -> None:
    assert mutants.tomllib.loads(f"x = {mutants.quoted(text)}")["x"] == text
