"""Plugins that import modules by their names of version 0.2."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

from megatron_port.former_names import FOLDERS, MOVED, FormerNames


@pytest.mark.parametrize("name", sorted(MOVED))
def test_a_former_name_is_the_module(name: str) -> None:
    now = importlib.import_module(f"megatron_port.{MOVED[name]}")
    spec = now.__spec__
    sys.modules.pop(f"megatron_port.{name}", None)
    with pytest.warns(DeprecationWarning, match=MOVED[name]):
        former = importlib.import_module(f"megatron_port.{name}")
    assert former is now and now.__spec__ is spec and now.__name__ == f"megatron_port.{MOVED[name]}"


def test_a_plugin_of_version_2_loads() -> None:
    code = (
        "from megatron_port.registry import OPTIMIZERS\nfrom megatron_port.optim.rules import ElementwiseRule\n"
        "import megatron_port.core.optim.rules as now\nassert now.ElementwiseRule is ElementwiseRule\n"
    )
    done = subprocess.run([sys.executable, "-W", "error::UserWarning", "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_other_names_are_not_found() -> None:
    for name in ("optim.sharded", "nothing", "core.optim.rules"):
        assert FormerNames().find_spec(f"megatron_port.{name}", None) is None
    assert FormerNames().find_spec("other.registry", None) is None and "optim" in FOLDERS
