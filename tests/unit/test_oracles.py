"""Every numeric option is in ``tests/oracles.toml``, with the oracle outside of the package that its definition is held
to, or with the reason why it has none."""

from __future__ import annotations

import ast
import dataclasses
import sys
import types
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import pytest

from megatron_port.core.config.schema import ParameterGroup, RunConfig
from megatron_port.core.registry import SECTIONS
from megatron_port.tools.compress.request import Request
from megatron_port.tools.inference.generation import Sampling

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # type: ignore[no-redef]

ROOT = Path(__file__).resolve().parents[2]
TABLE = tomllib.loads((ROOT / "tests" / "oracles.toml").read_text())
NUMBERS = (int, float, bool)


def is_numeric(kind: Any) -> bool:
    """Return whether values of a type are numbers, truth values or choices, or tuples of them."""
    if get_origin(kind) is Literal:
        return True
    if get_origin(kind) in (tuple, Union, types.UnionType):
        return any(is_numeric(part) for part in get_args(kind) if part is not ...)
    return kind in NUMBERS


def options(kind: Any, prefix: str = "") -> Iterator[str]:
    """Yield the dotted names of the numeric options of a dataclass."""
    hints = get_type_hints(kind)
    for field in dataclasses.fields(kind):
        name, hint = prefix + field.name, hints[field.name]
        if dataclasses.is_dataclass(hint):
            yield from options(hint, f"{name}.")
        elif is_numeric(hint):
            yield name


ALL = [*options(RunConfig), *options(ParameterGroup, "group."), *options(Sampling, "generate."),
       *(option for name in SECTIONS.builtin for option in options(SECTIONS.get(name, type), f"{name}.")),
       *options(Request, "compress."), "optimizer.decay"]  # names of a registry, each of which is a formula


def rows() -> Iterator[tuple[str, dict[str, Any]]]:
    for row in (*TABLE["held"], *TABLE["without"]):
        yield from ((pattern, row) for pattern in row["options"])


def test_every_numeric_option_has_one_row() -> None:
    assert len(ALL) > 200 and "optimizer.came.eps_square" in ALL and "model.moe.jitter" in ALL
    found = {name: [pattern for pattern, _ in rows() if fnmatchcase(name, pattern)] for name in ALL}
    missing = [name for name, patterns in found.items() if not patterns]
    assert not missing, f"{missing}: add them to tests/oracles.toml, under [[held]] with the oracle and its test"
    assert not {name: patterns for name, patterns in found.items() if len(patterns) > 1}
    gone = [pattern for pattern, _ in rows() if not any(fnmatchcase(name, pattern) for name in ALL)]
    assert not gone, f"{gone}: no option has this name any more"


def test_what_enters_a_number_is_held_to_something() -> None:
    """Sections of which every option changes the numbers of a run have no pattern without an oracle."""
    sections = ("model.", "optimizer.", "distillation.", "fine_tuning.", "quantisation.", "sparsity.", "batch.",
                "precision.", "group.", "generate.", "compress.")
    excused = [p for row in TABLE["without"] for p in row["options"] if p.startswith(sections)]
    assert not excused, excused
    assert all(row["by"] and row["tests"] for row in TABLE["held"]) and all(row["reason"] for row in TABLE["without"])


@pytest.mark.parametrize("name", TABLE["tests"])
def test_every_test_that_is_named_exists(name: str) -> None:
    named = {test.split("::")[1] for row in TABLE["held"] for test in row["tests"] if test.split("::")[0] == name}
    assert named, f"no row names a test of {name}"
    tree = ast.parse((ROOT / TABLE["tests"][name]).read_text())
    assert not named - {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_every_file_of_tests_has_a_name() -> None:
    used = {test.split("::")[0] for row in TABLE["held"] for test in row["tests"]}
    assert used <= set(TABLE["tests"])
