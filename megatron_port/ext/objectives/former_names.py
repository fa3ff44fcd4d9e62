"""Former names of the parameters of multi-token prediction, which checkpoints of version 0.2 and before have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def mtp_experts(config: Mapping[str, Any]) -> dict[str, str]:
    """Return former prefix → present one, from a manifest's configuration, of which nothing has been checked.

    To version 0.2 the experts and the router of the modules of multi-token prediction were saved as those of layers
    after the last, ``layers.N.mlp.…``, beside ``mtp.0.layer.attention.…``.
    """
    layers, modules = config["model"].get("num_layers"), config["model"]["mtp_layers"]
    if type(layers) is not int or type(modules) is not int:
        return {}
    return {f"layers.{layers + i}.mlp.": f"mtp.{i}.layer.mlp." for i in range(min(modules, 64))}
