"""Importing this imports deepspeed, with its accelerator named where there is only one answer.

DeepSpeed looks for a GPU when it is imported, and warns on every rank that it
found none. A CPU build of torch can have none. It also calls names that torch 2.13
has renamed, which warns once a call site on every rank. And ``deepspeed.initialize``
imports its Muon optimizer, whatever the optimizer, and a decorator there imports
inductor: seconds on every rank, and thousands of files from a shared disk. It is
imported here instead, not compiled.
"""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Callable
from typing import Any

import torch

if torch.version.cuda is None and torch.version.hip is None:
    os.environ.setdefault("DS_ACCELERATOR", "cpu")

warnings.filterwarnings("ignore", message=r".*torch\.distributed\.\w+` is deprecated", category=FutureWarning)

import deepspeed  # noqa: E402
from deepspeed.runtime import compiler as _compiler  # noqa: E402


def _as_it_is(*_: Any, **__: Any) -> Callable[[Any], Any]:
    return lambda function: function


def _import_muon() -> None:
    """The optimizer's functions stay Python: nothing here offers it, and the JIT guard would refuse to compile it."""
    compile_, _compiler.compile = _compiler.compile, _as_it_is
    try:
        with contextlib.suppress(ImportError):  # earlier releases have none
            import deepspeed.runtime.zero.muon.original_muon  # noqa: F401
    finally:
        _compiler.compile = compile_


_import_muon()

__all__ = ["deepspeed"]
