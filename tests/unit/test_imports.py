"""The laws of docs/architecture.md: who imports whom, who reads the environment, sizes. Read with ast."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "megatron_port"
LAYERS = ("core", "ext", "run", "tools", "cli")
LINES_OF_A_FILE, LINES_OF_A_FUNCTION = 700, 40
LINES_OF_THE_CORE = 19_770
"""12,000 were asked for (benchmarks/evidence/decisions.md). The number only gets smaller."""
PARAMETERS, FIELDS = 8, 22
"""The most that a constructor of the core takes, and that a dataclass of the core has outside of its configuration:
``CorpusMeta`` has a field for each key of its file."""


def core_in_order() -> list[str]:
    """Packages of the core, as the table in docs/architecture.md orders them."""
    lines = (ROOT / "docs" / "architecture.md").read_text().splitlines()
    return [name for line in lines if line.startswith("| `core/") for name in re.findall(r"`core/(\w+)`", line)]


def module_name(path: Path) -> str:
    """``megatron_port.core.config.loader``; a package's ``__init__`` keeps its last part."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


ORDER = core_in_order()
SOURCES = {module_name(path): path.read_text() for path in sorted(PACKAGE.rglob("*.py"))}


@functools.cache
def nodes_of(source: str) -> list[ast.AST]:
    """Every node of a module; these tests and those of names look at all of the package's."""
    return list(ast.walk(ast.parse(source)))


@pytest.fixture(scope="module", autouse=True)
def forget_the_nodes() -> Iterator[None]:
    yield
    nodes_of.cache_clear()
    needed.cache_clear()


def imported(nodes: Iterable[ast.AST], module: str) -> Iterator[tuple[int, str]]:
    """``(line, absolute module)`` of every import among ``nodes``; relative ones resolved."""
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = module.split(".")[: -node.level] if node.level else []
            whole = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                yield node.lineno, f"{whole}.{alias.name}"


def part_of(module: str) -> tuple[str, str]:
    """``("core", "dist")`` of a module in the package: its layer, and its package there; empty where there is none."""
    parts = [*module.split(".")[1:3], "", ""]
    return (parts[0], parts[1]) if parts[0] in ("core", "ext", "tools") else (parts[0], "")


def unlawful(importer: str, target: str) -> bool:
    """The laws: the core imports nothing else of the package, and within it downwards; a package of ``ext`` imports the
    core and itself; ``run`` those two; ``tools`` these three and one another; ``cli`` everything."""
    (layer, package), (other, wanted) = part_of(importer), part_of(target)
    if layer not in LAYERS or other not in LAYERS:
        return False
    if layer == other == "core":
        return wanted in ORDER and package in ORDER and ORDER.index(wanted) > ORDER.index(package)
    if layer == other == "ext":
        return wanted != package
    return LAYERS.index(other) > LAYERS.index(layer)


def unlawful_imports(sources: Mapping[str, str]) -> set[str]:
    """``"importer imports module"`` for every import against the laws, wherever it stands but for types."""
    known, out = {name.removesuffix(".__init__") for name in sources}, set()
    for module, source in sources.items():
        for name in needed(source, module):
            if name.split(".")[0] == "megatron_port" and unlawful(module, name):
                target = name if name in known else name.rpartition(".")[0]
                out.add(f"{module.removeprefix('megatron_port.')} imports {target.removeprefix('megatron_port.')}")
    return out


@functools.cache
def needed(source: str, module: str) -> frozenset[str]:
    """What a module imports where it runs, in functions too: not in the bodies of ``if TYPE_CHECKING``."""
    tests = [node for node in nodes_of(source) if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)]
    for_types = {id(node) for test in tests for statement in test.body for node in ast.walk(statement)}
    return frozenset(name for _, name in imported((n for n in nodes_of(source) if id(n) not in for_types), module))


def import_cycles(sources: Mapping[str, str]) -> list[list[str]]:
    """Modules that import one another, directly or through others, at their top or in a function: each group of them.

    An import for types alone does not count: a check of the whole configuration takes what the configuration holds."""
    known = {name.removesuffix(".__init__"): name for name in sources}
    needs: dict[str, set[str]] = {}
    for module, source in sources.items():
        names = set(needed(source, module))
        names |= {name.rpartition(".")[0] for name in names}  # "from package import module" and "from module import x"
        needs[module] = {known[name] for name in names if name in known} - {module}
    reach = {module: reachable(module, needs) for module in needs}
    groups = {frozenset(n for n in reach[m] if m in reach[n]) for m in needs if m in reach[m]}
    return sorted(sorted(group) for group in groups)


def reachable(start: str, edges: Mapping[str, set[str]]) -> set[str]:
    """Every node that a path of one edge or more leads to from ``start``."""
    found: set[str] = set()
    border = list(edges[start])
    while border:
        node = border.pop()
        if node not in found:
            found.add(node)
            border += edges[node]
    return found


def environment_reads(source: str) -> list[int]:
    """Lines that touch os.environ or os.getenv (or import them); setting a variable for a library is no reading."""
    out = []
    nodes = nodes_of(source)
    written = {n.value for n in nodes if isinstance(n, ast.Subscript) and isinstance(n.ctx, ast.Store)}
    names = {"environ", "environb", "getenv", "putenv"}
    for node in nodes:
        if isinstance(node, ast.Attribute):
            touched = node.attr in names and getattr(node.value, "id", "") == "os" and node not in written
        elif isinstance(node, ast.ImportFrom):
            touched = node.module == "os" and any(alias.name in names for alias in node.names)
        else:
            continue
        if touched:
            out.append(node.lineno)
    return out


CHANGES = {"add", "append", "appendleft", "clear", "difference_update", "discard", "extend", "insert",
           "intersection_update", "pop", "popitem", "popleft", "remove", "reverse", "rotate", "setdefault", "sort",
           "update"}
"""Methods that change a list, a set, a dictionary or a deque."""


def module_names(body: Iterable[ast.stmt]) -> Iterator[str]:
    """Names that a module assigns, also under ``if``, ``for``, ``try`` and ``with``; registries left out."""
    for node in body:
        if isinstance(node, (ast.Assign, ast.AnnAssign)):
            if isinstance(node.value, ast.Call) and getattr(node.value.func, "id", "") == "Registry":
                continue  # filled while a configuration is loaded, by what its plugins import
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from (n.id for target in targets for n in ast.walk(target) if isinstance(n, ast.Name))
        elif not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            for field in ("body", "orelse", "handlers", "finalbody"):
                yield from module_names(getattr(node, field, ()))


def changed_globals(source: str) -> list[int]:
    """Lines of functions that rebind a global (``global``), or change one: ``known.append(x)``, ``known[:] = x``."""
    module = nodes_of(source)[0]
    assert isinstance(module, ast.Module)
    names = frozenset(module_names(module.body))
    out = {node.lineno for node in nodes_of(source) if isinstance(node, ast.Global)}
    suspect = {id(n) for n in nodes_of(source) if isinstance(n, ast.expr) and changed_name(n) in names}
    for function in nodes_of(source) if suspect else ():
        if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            nodes = list(ast.walk(function))
            local = {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
            local |= {n.arg for n in nodes if isinstance(n, ast.arg)}
            out |= {n.lineno for n in nodes if id(n) in suspect and isinstance(n, ast.expr)
                    and changed_name(n) in names - local}
    return sorted(out)


def changed_name(node: ast.expr) -> str | None:
    """Name of the variable whose items an expression changes."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in CHANGES:
        changed = node.func.value
    elif isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load):
        changed = node.value
    else:
        return None
    return changed.id if isinstance(changed, ast.Name) else None


def function_lengths() -> list[int]:
    """Lines of every function and method, shortest first."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = (node for source in SOURCES.values() for node in nodes_of(source))
    return sorted((node.end_lineno or node.lineno) - node.lineno + 1 for node in nodes if isinstance(node, kinds))


def test_the_table_names_every_package_of_the_core() -> None:
    found = {part_of(module)[1] for module in SOURCES if part_of(module)[0] == "core"} - {"__init__"}
    assert len(ORDER) == len(set(ORDER)) > 10 and found == set(ORDER)


def test_the_layers_import_as_the_laws_say() -> None:
    assert not unlawful_imports(SOURCES)


def test_no_two_files_import_one_another() -> None:
    assert not import_cycles(SOURCES)


def test_the_environment_is_read_in_three_packages() -> None:
    readers = (("core", "io"), ("run", ""), ("ext", "deepspeed"))
    found = {m: environment_reads(source) for m, source in SOURCES.items() if part_of(m) not in readers}
    assert not {module: lines for module, lines in found.items() if lines}


def test_no_module_changes_its_globals() -> None:
    assert not {module: lines for module, source in SOURCES.items() if (lines := changed_globals(source))}


def test_nothing_imports_pickle() -> None:
    found = [f"{module}:{line}" for module, source in SOURCES.items()
             for line, name in imported(nodes_of(source), module) if name.split(".")[0] == "pickle"]
    assert not found


def test_a_configuration_needs_no_torch() -> None:
    first = ORDER[: ORDER.index("config") + 1]
    found = [f"{module}:{line}: {name}" for module, source in SOURCES.items()
             if part_of(module)[0] == "core" and part_of(module)[1] in first
             for line, name in imported(nodes_of(source), module)
             if name.split(".")[0] in ("torch", "numpy", "deepspeed")]
    assert not found


def test_files_and_functions_stay_small() -> None:
    lines = {module: len(source.splitlines()) for module, source in SOURCES.items()}
    assert not {module: n for module, n in lines.items() if n > LINES_OF_A_FILE}
    functions = function_lengths()
    assert functions[int(0.95 * len(functions))] <= LINES_OF_A_FUNCTION


def constructors(source: str) -> Iterator[tuple[str, int, bool]]:
    """Classes of a module: the name, the parameters of ``__init__`` or the fields, and whether these are fields."""
    for node in nodes_of(source):
        if isinstance(node, ast.ClassDef):
            for method in node.body:
                if isinstance(method, ast.FunctionDef) and method.name == "__init__":
                    given = method.args
                    yield node.name, len([*given.posonlyargs, *given.args, *given.kwonlyargs]) - 1, False
            if any("dataclass" in ast.dump(decorator) for decorator in node.decorator_list):
                yield node.name, sum(isinstance(field, ast.AnnAssign) for field in node.body), True


def test_the_core_stays_small() -> None:
    core = {module: source for module, source in SOURCES.items() if part_of(module)[0] == "core"}
    assert sum(len(source.splitlines()) for source in core.values()) <= LINES_OF_THE_CORE
    large = {f"{module}.{name}": count
             for module, source in core.items() for name, count, fields in constructors(source)
             if count > (FIELDS if fields else PARAMETERS) and not (fields and part_of(module)[1] == "config")}
    assert not large


@pytest.mark.parametrize(
    ("module", "source", "faults"),
    [
        ("megatron_port.core.model.decoder", "from megatron_port.core.engine.api import MicroBatch", 1),
        ("megatron_port.core.model.decoder", "from megatron_port.core import engine", 1),
        ("megatron_port.core.model.decoder", "def f():\n    import megatron_port.core.train.loop", 1),
        ("megatron_port.core.model.decoder", "from ..engine import api", 1),
        ("megatron_port.core.model.decoder", "from ..dist import record\nfrom . import layers", 0),
        ("megatron_port.core.model.decoder", "from megatron_port.core.config.schema import ModelConfig", 0),
        ("megatron_port.core.errors", "from megatron_port.core.config.schema import RunConfig", 1),
        ("megatron_port.core.train.loop", "from megatron_port.ext.health import anomaly", 1),
        ("megatron_port.core.train.loop", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    "
                                          "from megatron_port.ext.health import anomaly", 0),
        ("megatron_port.ext.memory.swap", "from megatron_port.ext.health import anomaly", 1),
        ("megatron_port.ext.memory.swap", "from megatron_port.ext.memory import offload", 0),
        ("megatron_port.ext.memory.swap", "from megatron_port.tools.plan import text", 1),
        ("megatron_port.core.train.loop", "from megatron_port.run import session", 1),
        ("megatron_port.ext.memory.swap", "from megatron_port.run import session", 1),
        ("megatron_port.run.session", "from megatron_port.ext.memory import offload", 0),
        ("megatron_port.run.session", "from megatron_port.tools.plan import text", 1),
        ("megatron_port.tools.plan.text", "from megatron_port.ext.memory import offload", 0),
        ("megatron_port.tools.plan.text", "from megatron_port.cli import main", 1),
        ("megatron_port.cli.main", "import megatron_port.core.train, megatron_port.tools.plan.text, torch", 0),
    ],
)
def test_the_test_sees_unlawful_imports(module: str, source: str, faults: int) -> None:
    assert len(unlawful_imports({module: source})) == faults


@pytest.mark.parametrize(
    ("first", "cycle"),
    [
        ("from megatron_port.a.c import x", True),
        ("import megatron_port.a.c", True),
        ("from . import c", True),
        ("try:\n    from megatron_port.a import c\nexcept ImportError:\n    pass", True),
        ("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from megatron_port.a.c import x", False),
        ("def f():\n    from megatron_port.a.c import x", True),
        ("from megatron_port.a.d import x", False),
    ],
)
def test_the_test_sees_cycles(first: str, cycle: bool) -> None:
    sources = {
        "megatron_port.a.__init__": "", "megatron_port.a.b": first, "megatron_port.a.d": "",
        "megatron_port.a.c": "from megatron_port.a.e import y", "megatron_port.a.e": "import megatron_port.a.b",
    }
    assert import_cycles(sources) == ([[f"megatron_port.a.{m}" for m in "bce"]] if cycle else [])


def test_the_test_sees_the_environment() -> None:
    assert environment_reads("import os\nx = os.environ['A']\ny = os.getenv('B')") == [2, 3]
    assert environment_reads("from os import environ") == [1]
    assert environment_reads("import os\nos.environ['A'] = os.environ.get('B')\nos.environ['A'] = 'x'") == [2]
    assert environment_reads("import os\nos.path.join('a')\nself.environ") == []


@pytest.mark.parametrize(("source", "lines"), [
    ("known = []\ndef f(x):\n    known.append(x)", [3]),
    ("known: dict[str, int] = {}\ndef f(x):\n    known[x] = 1\n    del known[x]", [3, 4]),
    ("if True:\n    known = set()\nclass A:\n    def f(self):\n        return lambda x: known.add(x)", [5]),
    ("known = []\ndef f(x):\n    known[:] = [x]", [3]),
    ("known = 0\ndef f():\n    global known\n    known = 1", [3]),
    ("known = []\nfor x in range(3):\n    known.append(x)", []),  # while the module is imported
    ("known = []\ndef f(known, x):\n    known.append(x)", []),
    ("known = []\ndef f(x):\n    known = []\n    known.append(x)", []),
    ("known = {1: 2}\ndef f(x):\n    return known[x], known.get(x)", []),
])
def test_the_test_sees_changed_globals(source: str, lines: list[int]) -> None:
    assert changed_globals(source) == lines
