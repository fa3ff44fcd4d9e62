"""Adds the version and the kernels for this machine's CPU to an installation; everything else is in pyproject.toml.

``pip install .`` compiles the kernels with g++ and, where torch's headers can be found, the binding (seconds). Without
them the package works on torch's own ops and the start-up table names those; ``make kernels`` builds them for a
checkout, GPUs included. No library here knows Python's own interface (the binding is on torch's stable ABI), so one
wheel serves every Python.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py
from setuptools.dist import Distribution

HERE = Path(__file__).resolve().parent
BASE = "0.1.0"
"""The version before the first tag."""
NEEDED = "MP_KERNELS_NEEDED"
"""Set: a wheel without its kernels is an error (``make release``)."""


def version() -> str:
    """Return the version: what an sdist says, else by git: a tag v1.2.3, or so many commits after the last one."""
    said = HERE / "PKG-INFO"
    if said.is_file():
        found = re.search(r"^Version: (\S+)$", said.read_text(encoding="utf-8"), re.M)
        if found:
            return found[1]

    def git(*words: str) -> str:
        command = ["git", "-C", str(HERE), *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    if not (HERE / ".git").exists():
        return f"{BASE}.dev0"
    try:
        described = git("describe", "--tags", "--match", "v[0-9]*", "--long", "--always", "--abbrev=9")
        found = re.fullmatch(r"v(\d+(?:\.\d+)*)-(\d+)-g([0-9a-f]+)", described)
        if found and found[2] == "0":
            return found[1]
        if found:
            *lead, last = found[1].split(".")
            return f"{'.'.join([*lead, str(int(last) + 1)])}.dev{found[2]}+g{found[3]}"
        return f"{BASE}.dev{git('rev-list', '--count', 'HEAD')}+g{git('rev-parse', '--short=9', 'HEAD')}"
    except (OSError, subprocess.CalledProcessError):  # no git, or not its owner's checkout
        return f"{BASE}.dev0"


def build_script() -> ModuleType:
    """kernels/build.py as a module."""
    spec = importlib.util.spec_from_file_location("kernels_build", HERE / "kernels" / "build.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["kernels_build"] = module
    spec.loader.exec_module(module)
    return module


class BuildWithKernels(build_py):
    """build_py, then the version, the CPU library and the binding into what is built."""

    def run(self) -> None:
        super().run()
        if getattr(self, "editable_mode", False):
            return  # a checkout has its own: make kernels
        package = Path(self.build_lib) / "megatron_port"
        text = f'"""Written by setup.py."""\n\n__version__ = "{self.distribution.get_version()}"\n'
        (package / "_version.py").write_text(text, encoding="utf-8")
        if not (HERE / "kernels" / "build.py").is_file() and not os.environ.get(NEEDED):
            print("megatron_port: kernels left out: no kernels/ here", file=sys.stderr)
            return
        script = build_script()
        shutil.rmtree(package / "_kernels", ignore_errors=True)  # of an earlier build
        for target in ("cpu", "binding"):
            try:
                script.build(script.plan(target, ()), package / "_kernels")
            except (script.Missing, script.Failed) as error:
                if os.environ.get(NEEDED):
                    raise
                print(f"megatron_port: kernels: {target} left out: {error}", file=sys.stderr)


class AnyPython(bdist_wheel):
    """A wheel of one platform, for every Python."""

    def get_tag(self) -> tuple[str, str, str]:
        """Return py3, none, and the platform."""
        return "py3", "none", super().get_tag()[2]


class BinaryDistribution(Distribution):
    """The wheel is of one platform."""

    def has_ext_modules(self) -> bool:
        return True


if __name__ == "__main__":
    setup(version=version(), cmdclass={"build_py": BuildWithKernels, "bdist_wheel": AnyPython},
          distclass=BinaryDistribution)
