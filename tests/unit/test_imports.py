"""The packages of docs/architecture.md: who imports whom, who reads the environment, who has globals. Read with ast."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "megatron_port"


def packages_in_order() -> list[str]:
    """First column of the table in docs/architecture.md."""
    packages: list[str] = []
    for line in (ROOT / "docs" / "architecture.md").read_text().splitlines():
        if re.match(r"\| `\w+`", line):
            packages += re.findall(r"`(\w+)`", line.split("|")[1])
    return packages


ORDER = packages_in_order()
FILES = sorted(p for p in PACKAGE.rglob("*.py"))


def module_name(path: Path) -> str:
    """``megatron_port.config.loader``; a package's ``__init__`` keeps its last part."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


def imported(source: str, module: str) -> Iterator[tuple[int, str]]:
    """``(line, absolute module)`` of every import, wherever it stands; relative ones resolved."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = module.split(".")[: -node.level] if node.level else []
            whole = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                yield node.lineno, f"{whole}.{alias.name}"


def package_of(module: str) -> str | None:
    """The package of a module of the package; None for the package itself and for others' modules."""
    parts = module.split(".")
    return parts[1] if parts[0] == "megatron_port" and len(parts) > 1 and parts[1] in ORDER else None


def upward_imports(source: str, module: str) -> list[str]:
    """Imports of a package that stands below the importer's in the table."""
    package = package_of(module)
    if package is None:
        return []
    out = []
    for line, name in imported(source, module):
        target = package_of(name)
        if target and ORDER.index(target) > ORDER.index(package):
            out.append(f"{module}:{line}: {package} imports {name}")
    return out


def environment_reads(source: str) -> list[int]:
    """Lines that touch os.environ or os.getenv (or import them); setting a variable for a library is no reading."""
    out = []
    tree = ast.parse(source)
    written = {n.value for n in ast.walk(tree) if isinstance(n, ast.Subscript) and isinstance(n.ctx, ast.Store)}
    for node in ast.walk(tree):
        if node in written:
            continue
        names = {"environ", "environb", "getenv", "putenv"}
        touched = isinstance(node, ast.Attribute) and node.attr in names and getattr(node.value, "id", "") == "os"
        taken = isinstance(node, ast.ImportFrom) and node.module == "os" and names & {a.name for a in node.names}
        if touched or taken:
            out.append(node.lineno)
    return out


def test_the_table_names_every_folder() -> None:
    assert len(ORDER) == len(set(ORDER)) > 10 and ORDER[:2] == ["errors", "config"] and ORDER[-1] == "cli"
    folders = {p.parent.relative_to(PACKAGE).parts[0] for p in FILES if p.parent != PACKAGE}
    assert folders <= set(ORDER)
    assert {p.stem for p in PACKAGE.glob("*.py")} - {"__init__", "__main__"} <= set(ORDER)


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_a_room_imports_only_rooms_above(path: Path) -> None:
    assert not upward_imports(path.read_text(), module_name(path))


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_laws_of_the_house(path: Path) -> None:
    source, package = path.read_text(), package_of(module_name(path))
    if package != "runtime":
        assert not environment_reads(source), "environment variables are read in runtime/ only"
    changed = [n.lineno for n in ast.walk(ast.parse(source)) if isinstance(n, ast.Global)]
    assert not changed, f"no module globals, but `global` at lines {changed}"
    pickles = [(line, name) for line, name in imported(source, module_name(path)) if name.split(".")[0] == "pickle"]
    assert not pickles


@pytest.mark.parametrize("package", ["errors", "config"])
def test_the_first_packages_need_no_torch(package: str) -> None:
    for path in FILES:
        if package_of(module_name(path)) == package:
            names = {name.split(".")[0] for _, name in imported(path.read_text(), module_name(path))}
            assert not names & {"torch", "numpy", "deepspeed"}, path


@pytest.mark.parametrize(
    ("module", "source", "faults"),
    [
        ("megatron_port.model.gpt", "from megatron_port.engine.api import MicroBatch", 1),
        ("megatron_port.model.gpt", "from megatron_port import engine", 1),
        ("megatron_port.model.gpt", "def f():\n    import megatron_port.train.loop", 1),
        ("megatron_port.model.gpt", "from ..engine import api", 1),
        ("megatron_port.model.gpt", "from ..parallel import record\nfrom . import layers", 0),
        ("megatron_port.model.gpt", "from megatron_port.config.schema import ModelConfig", 0),
        ("megatron_port.config.checks", "from megatron_port.runtime.rank_zero import is_rank_zero", 1),
        ("megatron_port.errors", "from megatron_port.config.schema import RunConfig", 1),
        ("megatron_port.cli.main", "import megatron_port.train, torch", 0),
    ],
)
def test_the_test_sees_faults(module: str, source: str, faults: int) -> None:
    assert len(upward_imports(source, module)) == faults


def test_the_test_sees_the_environment() -> None:
    assert environment_reads("import os\nx = os.environ['A']\ny = os.getenv('B')") == [2, 3]
    assert environment_reads("from os import environ") == [1]
    assert environment_reads("import os\nos.environ['A'] = os.environ.get('B')\nos.environ['A'] = 'x'") == [2]
    assert environment_reads("import os\nos.path.join('a')\nself.environ") == []
