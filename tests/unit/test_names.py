"""Sentences of the package: no word of a private language, docstrings with a head noun, no class name pasted into one.

Names are a matter of review. What is here has happened by accident, and reads well enough to be missed.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_imports import forget_the_nodes, nodes_of  # noqa: F401  # a fixture

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
from readability import PHRASES, Refused  # noqa: E402

PACKAGE = {path: path.read_text() for path in sorted((ROOT / "megatron_port").rglob("*.py"))}
SOURCES = PACKAGE | {path: path.read_text() for path in sorted((ROOT / "kernels").rglob("*.py"))}
PRODUCTS = {"AdamW"}
"""Classes that are named as papers and other programs name the thing."""


@pytest.fixture(scope="module")
def suspects() -> list[tuple[str, str]]:
    """``(file:line, text)`` of the lines that one of the patterns matches: one search a line, not one for each."""
    search = re.compile("|".join(f"(?:{refused.pattern})" for refused in PHRASES)).search
    return [(f"{path.relative_to(ROOT)}:{number}", line) for path, text in SOURCES.items()
            for number, line in enumerate(text.splitlines(), 1) if search(line)]


@pytest.mark.parametrize("refused", PHRASES, ids=lambda r: r.pattern[:40])
def test_no_phrase_of_a_private_language(refused: Refused, suspects: list[tuple[str, str]]) -> None:
    """scripts/readability.py looks for them in the pages."""
    found = [place for place, line in suspects
             if re.search(refused.pattern, line) and not (refused.allowed and re.search(refused.allowed, line))]
    assert not found, f"use {refused.use}: {', '.join(found)}"


def public_docstrings(source: str) -> Iterator[tuple[int, str]]:
    """``(line, docstring)`` of every public function, method, class and field that has one."""
    for node in nodes_of(source):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) and not node.name.startswith("_"):
            text = ast.get_docstring(node)
            if text:
                yield node.lineno, text
        if isinstance(node, ast.ClassDef):
            for field, after in zip(node.body, node.body[1:]):
                if not isinstance(field, ast.AnnAssign) or not isinstance(after, ast.Expr):
                    continue
                if isinstance(after.value, ast.Constant):
                    yield after.lineno, str(after.value.value)


def bad_opening(text: str) -> bool:
    """A docstring that only refers elsewhere, or that has no head noun: "See x", "Of the output's gradient: …"."""
    return re.match(r"(See|Of|What is made of)\b", text) is not None


def test_public_docstrings_start_with_a_verb_or_a_noun() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}"
        for path, text in PACKAGE.items()
        for line, said in public_docstrings(text)
        if bad_opening(said)
    ]
    assert not found, found


def test_an_opening_without_a_verb_or_a_noun_is_found() -> None:
    source = 'class A:\n    """See ``B``."""\n    def f(self):\n        """Of the output: what it takes."""\n'
    assert [line for line, text in public_docstrings(source) if bad_opening(text)] == [1, 3]
    source = 'class A:\n    x: int\n    """Of the run."""\n'
    assert [line for line, text in public_docstrings(source) if bad_opening(text)] == [3]
    assert not bad_opening("Offset of the first row.") and not bad_opening("Return the loss.")


def classes_of(source: str) -> set[str]:
    return {node.name for node in nodes_of(source) if isinstance(node, ast.ClassDef)}


def pasted_names(source: str, classes: set[str]) -> list[int]:
    """Lines of strings that begin with a class of another file: a search and replace went through prose as well."""
    nodes = nodes_of(source)
    known = {n.name for n in nodes if isinstance(n, (ast.ClassDef, ast.alias))}
    return sorted(
        n.lineno for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str)
        and (found := re.match(r"\s*([A-Z][a-z]+[A-Z]\w*) [a-z]", n.value)) and found[1] in classes - known)


def test_no_sentence_begins_with_the_class_of_another_file() -> None:
    classes = set().union(*map(classes_of, PACKAGE.values())) - PRODUCTS
    found = {str(path.relative_to(ROOT)): lines for path, text in PACKAGE.items()
             if (lines := pasted_names(text, classes))}
    assert not found, found


def test_a_pasted_name_is_found() -> None:
    assert pasted_names('limit = 3\n"""LinearKernels between two events."""', {"LinearKernels"}) == [2]
    assert pasted_names('class LinearKernels:\n    """LinearKernels of a layer."""', {"LinearKernels"}) == []
    assert pasted_names('"""Matmuls, by ``LinearKernels`` of a layer."""', {"LinearKernels"}) == []
