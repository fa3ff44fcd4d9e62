"""Choice of what exchanges the rows of experts between ranks: torch's all-to-all, or a library that is installed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from megatron_port.core.config.schema import BackendConfig
from megatron_port.core.dist.rank import DeviceInfo
from megatron_port.core.errors import EnvironmentFault
from megatron_port.core.layers.providers import ProviderRow
from megatron_port.core.registry import PARTS
from megatron_port.ext.kernels.optional import optional_import

KINDS = {"deepep": "cuda", "mori": "rocm"}
"""The devices that libraries are for."""
MODULES = {"deepep": ("deep_ep",), "mori": ("mori.ops", "mori.shmem")}
"""Their modules, of which an exchange takes what they have."""
DTYPES = {"deepep": (torch.bfloat16,), "mori": (torch.bfloat16, torch.float32)}


def choose_exchange(
    config: BackendConfig, device: DeviceInfo, dtype: torch.dtype
) -> tuple[Callable[..., Any] | None, ProviderRow]:
    """Return what ``backend.experts_exchange`` asks for (None: torch's all-to-all) and its row of the table.

    Raises:
        EnvironmentFault: it cannot serve here; the message says what is missing.
    """
    asked = config.experts_exchange
    if asked == "torch":
        return None, ProviderRow("experts_exchange", "torch", "all_to_all_single")
    problem = ""
    if device.kind != KINDS[asked]:
        problem = f"it needs a GPU of {'AMD' if asked == 'mori' else 'NVIDIA'}, not {device.kind}"
    elif dtype not in DTYPES[asked]:
        names = " or ".join(str(d).removeprefix("torch.") for d in DTYPES[asked])
        problem = f"it moves {names}, not {str(dtype).removeprefix('torch.')}"
    found = [] if problem else [optional_import(name) for name in MODULES[asked]]
    problem = problem or next((why for _, why in found if why), "")
    if problem:
        raise EnvironmentFault(
            f'backend.experts_exchange = "{asked}" cannot serve: {problem}; set backend.experts_exchange = "torch"'
        )
    modules = [module for module, _ in found]
    made = PARTS.function(f"exchange of rows, {asked}")(*modules)
    return made, ProviderRow("experts_exchange", asked, "asked for; a row for each copy of a token, as torch's")
