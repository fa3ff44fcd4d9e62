"""Import of DeepSpeed with the answer to which ops it may build."""

from __future__ import annotations

import os
from typing import Any

from megatron_port.core.errors import EnvironmentFault


def prepare_deepspeed() -> None:
    """Import deepspeed so that it builds nothing on its own.

    On its first question which ops are compatible DeepSpeed starts compilers to find out, and on a CPU
    ``init_distributed`` asks that and compiles ``deepspeed_shm_comm`` (half a minute) for collectives
    that training never calls. Here the answer is given beforehand: compatible is what is built.

    Raises:
        EnvironmentFault: deepspeed is not installed or cannot be imported.
    """
    try:
        import megatron_port.ext.deepspeed.deepspeed_import  # noqa: F401, I001
        import deepspeed.ops
        from deepspeed.git_version_info import installed_ops
    except EnvironmentFault:  # not installed
        raise
    except Exception as error:  # deepspeed raises many kinds when its installation does not fit torch
        raise EnvironmentFault(
            f"engine deepspeed cannot be used: import deepspeed failed with {type(error).__name__}: {error}; "
            f"install it again (`make setup`) or set engine = \"native\""
        ) from error
    deepspeed.ops.__compatible_ops__ = {op: bool(built) for op, built in installed_ops.items()}


def import_deepspeed() -> Any:
    """Return deepspeed, prepared, and leave the environment as it was.

    Raises:
        EnvironmentFault: see :func:`prepare_deepspeed`.
    """
    before = dict(os.environ)
    try:
        prepare_deepspeed()
        import deepspeed
    finally:
        os.environ.clear()
        os.environ.update(before)
    return deepspeed
