"""Short names of layouts, ``tp2pp2dp2sp``: what ``parity`` takes."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from megatron_port.core.config.schema import LayoutConfig
from megatron_port.core.errors import ConfigError

AXES = {
    "tp": "tensor_parallel_size", "pp": "pipeline_parallel_size", "dp": "data_parallel_size",
    "cp": "context_parallel_size", "ep": "expert_parallel_size", "shard": "shard_size",
}
"""Part of a name → the size in ``layout``; a part that is left out is 1, ``shard`` 0 (all of dp)."""
_PART = re.compile(rf"({'|'.join(AXES)})(\d+)|(sp)")


def parse_layout(text: str, base: LayoutConfig) -> LayoutConfig:
    """Return ``base`` with the sizes of a name; its parts may stand in any order, ``sp`` is sequence parallelism.

    Raises:
        ConfigError: a part is unknown or given twice.
    """
    sizes = dict.fromkeys(AXES, 1) | {"shard": 0}
    seen: list[str] = []
    end = 0
    for match in _PART.finditer(text):
        if match.start() != end:
            break
        seen.append(match[1] or "sp")
        if match[1]:
            sizes[match[1]] = int(match[2])
        end = match.end()
    if end != len(text) or not seen or len(set(seen)) != len(seen):
        raise ConfigError(
            f"layout {text!r}: write sizes behind {', '.join(AXES)}, each at most once, and sp for sequence "
            "parallelism: tp2pp2dp2sp"
        )
    same_stages = sizes["pp"] == base.pipeline_parallel_size
    changes: dict[str, Any] = {AXES[part]: size for part, size in sizes.items()}
    return replace(
        base, **changes, sequence_parallel="sp" in seen, pipeline_split=base.pipeline_split if same_stages else ()
    )
