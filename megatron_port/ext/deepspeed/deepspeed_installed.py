"""Whether DeepSpeed, an optional dependency, is installed; asked without importing it."""

from __future__ import annotations

import importlib.util

from megatron_port.core.errors import EnvironmentFault


def require_deepspeed() -> None:
    """Raise EnvironmentFault, with the command that installs it, where DeepSpeed is not installed."""
    if importlib.util.find_spec("deepspeed") is None:
        raise EnvironmentFault(
            "engine deepspeed cannot be used: DeepSpeed is not installed; pip install 'megatron_port[deepspeed]' (or "
            'make setup, which also builds its ops ahead of time), or set engine = "native"'
        )
