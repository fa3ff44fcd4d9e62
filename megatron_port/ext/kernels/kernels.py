"""The project's own kernels: which libraries are built, which one this machine takes, and loading it into torch.

``kernels/`` in the repository has the sources and ``kernels/build.py`` (``make kernels``) builds them into
``megatron_port/_kernels``. Nothing is compiled here. After :func:`load` the ops are at ``torch.ops.megatron_port``;
``backend/ops`` wraps them with gradients.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import importlib
import pkgutil
import platform
from pathlib import Path
from typing import Any

import torch

from megatron_port.core import package
from megatron_port.core.errors import EnvironmentFault
from megatron_port.core.io.files import read_regular
from megatron_port.core.io.typed_json import LARGEST, WrongContent, parse_json, typed
from megatron_port.core.io.variables import CPU_LEVEL, cpu_level
from megatron_port.ext.kernels.cpu_levels import cpu_levels, processor_flags

# Packages that a provider may come from, where they are installed.

def optional_import(name: str) -> tuple[Any | None, str]:
    """Return (module, "") or (None, why not). A package built for another torch may raise anything."""
    try:
        return importlib.import_module(name), ""
    except ModuleNotFoundError as error:
        return None, f"{error.name or name} is not installed"
    except Exception as error:
        return None, f"import {name} fails: {type(error).__name__}: {error}"


FOLDER = package.FOLDER / "_kernels"
BINDING = "libmp_binding.so"
BUILD_COMMAND = "make kernels (or: python kernels/build.py)"


def library_path(kind: str, folder: Path = FOLDER) -> tuple[Path | None, str]:
    """Return (library for cpu, cuda or rocm, "") or (None, why there is none)."""
    names = [f"libmp_{kind}.so"]
    if kind == "cpu":
        levels = cpu_levels(processor_flags(), platform.machine())
        wanted = cpu_level()
        if wanted and wanted not in levels:
            return None, f"{CPU_LEVEL} is {wanted!r}; this processor can run {', '.join(levels) or 'none'}"
        names = [f"libmp_cpu-{level}.so" for level in ([wanted] if wanted else levels)]
    for name in names:
        if (folder / name).exists():
            return folder / name, ""
    if kind == "cpu" and not names:
        return None, "this processor is older than x86-64-v2"
    return None, f"{' or '.join(names)} is not built; {BUILD_COMMAND}"


@dataclasses.dataclass(frozen=True)
class BuiltLibrary:
    """Entry of ``manifest.json`` for a library."""

    target: str
    compiler: str


def kernels_status(kind: str, folder: Path = FOLDER) -> tuple[str, str]:
    """Return (what is built for cpu, cuda or rocm, "") or ("", why it cannot be used). Loads nothing."""
    path, problem = library_path(kind, folder)
    if path is None:
        return "", problem
    if not (folder / BINDING).exists():
        return "", f"{BINDING} is not built; {BUILD_COMMAND}, with torch installed"
    try:
        about = typed(BuiltLibrary, parse_json(read_regular(folder / "manifest.json", LARGEST)).get(path.name))
    except (OSError, WrongContent, AttributeError):  # AttributeError: no table
        return path.name, ""
    return f"{path.name}: {about.target}; {about.compiler}", ""


@functools.cache
def _binding(path: Path) -> ctypes.CDLL:
    """The binding in torch's registry, with gradients and shapes of every op. Once a process: torch.ops is global."""
    torch.ops.load_library(str(path))
    library = ctypes.CDLL(str(path))
    library.megatron_port_load.restype = ctypes.c_char_p
    library.megatron_port_load.argtypes = [ctypes.c_char_p, ctypes.c_int32]
    ops = importlib.import_module("megatron_port.ext.kernels.ops")
    for module in sorted(pkgutil.iter_modules(ops.__path__), key=lambda m: m.name):
        found = vars(importlib.import_module(f"{ops.__name__}.{module.name}"))
        for register in [found[name] for name in found if name.startswith("register_")]:
            register()
    return library


def load(kind: str, *, folder: Path = FOLDER, library: Path | None = None) -> str:
    """Load the kernels for tensors of cpu, cuda or rocm; return a description of the library.

    A later call for the same kind of tensor replaces the library. ``library``: this file (the tests' emulated ones).

    Raises:
        EnvironmentFault: it is not built, or does not fit this torch or this machine.
    """
    path, problem = (library, "") if library is not None else library_path(kind, folder)
    if path is None:
        raise EnvironmentFault(f"own kernels for {kind} cannot be used: {problem}")
    binding = folder / BINDING
    if not binding.exists():
        raise EnvironmentFault(f"own kernels cannot be used: {BINDING} is not built; {BUILD_COMMAND}")
    try:
        loaded = _binding(binding)
    except (OSError, RuntimeError) as error:
        raise EnvironmentFault(f"own kernels cannot be used: {binding} does not load: {error}; build it again with "
                               f"this torch ({torch.__version__}): {BUILD_COMMAND}") from error
    wrong = loaded.megatron_port_load(str(path).encode(), 0 if kind == "cpu" else 1)
    if wrong is not None:
        raise EnvironmentFault(f"own kernels for {kind} cannot be used: {path}: {wrong.decode()}; "
                               f"build again: {BUILD_COMMAND}")
    about = ctypes.CDLL(str(path)).mp_target
    about.restype = ctypes.c_char_p
    return f"{path.name} ({about().decode()})"
