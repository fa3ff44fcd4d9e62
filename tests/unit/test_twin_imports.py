"""The twin shares nothing with what it checks."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

TWIN = Path(__file__).resolve().parents[1] / "twin"
FILES = sorted(TWIN.rglob("*.py"))


def foreign(source: str) -> set[str]:
    """Packages that a module imports, or names as an argument of an import, beyond torch, numpy and what Python has."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add("twin" if node.level else (node.module or "").split(".")[0])
        elif isinstance(node, ast.Name) and node.id in ("__import__", "exec", "eval"):
            found.add(node.id)
    return found - {"torch", "numpy", "twin"} - (set(sys.stdlib_module_names) - {"importlib", "runpy", "subprocess"})


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.name)
def test_it_imports_torch_and_numpy_alone(path: Path) -> None:
    assert not foreign(path.read_text())


def test_the_test_sees_what_it_forbids() -> None:
    assert len(FILES) > 4
    assert foreign("import megatron_port.core.optim, json\nfrom cases import x") == {"megatron_port", "cases"}
    assert foreign("import importlib\n__import__('x')") == {"importlib", "__import__"}
    assert not foreign("from . import data\nfrom twin.data import Blend\nimport numpy as np")
