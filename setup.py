"""Adds the kernels for this machine's CPU to an installation; everything else is in pyproject.toml.

``pip install .`` compiles them with g++ and, where torch's headers can be found, the binding (seconds). Without them
the package works on torch's own ops and says so; ``make kernels`` builds them for a checkout, GPUs included.
"""

from __future__ import annotations

import importlib.util
import shutil
import sys
from pathlib import Path
from types import ModuleType

from setuptools import setup
from setuptools.command.build_py import build_py
from setuptools.dist import Distribution

HERE = Path(__file__).resolve().parent


def build_script() -> ModuleType:
    """kernels/build.py as a module."""
    spec = importlib.util.spec_from_file_location("kernels_build", HERE / "kernels" / "build.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["kernels_build"] = module
    spec.loader.exec_module(module)
    return module


class BuildWithKernels(build_py):
    """build_py, then the CPU library and the binding into what is built."""

    def run(self) -> None:
        super().run()
        if getattr(self, "editable_mode", False):
            return  # a checkout has its own: make kernels
        script = build_script()
        shutil.rmtree(Path(self.build_lib) / "megatron_port" / "_kernels", ignore_errors=True)  # of an earlier build
        for target in ("cpu", "binding"):
            try:
                script.build(script.plan(target, ()), Path(self.build_lib) / "megatron_port" / "_kernels")
            except (script.Missing, script.Failed) as error:
                print(f"megatron_port: kernels: {target} left out: {error}", file=sys.stderr)


class BinaryDistribution(Distribution):
    """The wheel is of one platform."""

    def has_ext_modules(self) -> bool:
        return True


setup(cmdclass={"build_py": BuildWithKernels}, distclass=BinaryDistribution)
