"""Importing this imports deepspeed, with its accelerator named where there is only one answer.

DeepSpeed looks for a GPU when it is imported, and warns on every rank that it
found none. A CPU build of torch can have none. It also calls names that torch 2.13
has renamed, which warns once a call site on every rank. And ``deepspeed.initialize``
imports its Muon optimizer, whatever the optimizer, and a decorator there imports
inductor: seconds on every rank, and thousands of files from a shared disk. It is
imported here instead, not compiled. Likewise torch's optimizers import dynamo when
they are first used, to keep it out of four of their methods: 1.5 to 2 s, 60 MB and
900 files per rank, for a compiler that an engine of ours never calls.

Raises EnvironmentFault where DeepSpeed is not installed.
"""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Callable
from typing import Any

import torch

from megatron_port.ext.deepspeed.deepspeed_installed import require_deepspeed

require_deepspeed()
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


def _spare_dynamo() -> None:
    """Let torch's optimizers find what they would import dynamo for: the method itself, which nothing traces here."""
    for name in ("add_param_group", "zero_grad", "state_dict", "load_state_dict"):
        method = getattr(getattr(torch.optim.Optimizer, name), "__wrapped__", None)
        if method is not None:  # a torch that has another way
            method.__dict__.setdefault("__dynamo_disable", method)


_import_muon()
_spare_dynamo()

__all__ = ["deepspeed"]
