"""benchmarks/programs.py, which describes other systems' programs and is part of no package."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from megatron_port.tools.plan.engines import Engine

with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(str(Path(__file__).resolve().parents[2] / "benchmarks"))
    programs: Any = import_module("programs")

Program = programs.Program


def doing_also(engine: Engine, **more: Any) -> Engine:
    """Return a program that does as ``engine`` does, and what only programs of others do."""
    program: Engine = Program(**vars(engine), **more)
    return program
