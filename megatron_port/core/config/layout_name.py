"""Short names of layouts, ``tp2pp2dp2sp``: what ``parity`` takes and reports print."""

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
ALWAYS = ("tp", "pp", "dp")
"""Parts that a name has even where they are 1."""
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


def layout_name(layout: LayoutConfig) -> str:
    """Return the name of a layout: ``tp2pp2dp4shard2sp``; sizes that are left at their default are not in it."""
    parts = []
    for part, name in AXES.items():
        size = getattr(layout, name)
        if part in ALWAYS or size > (0 if part == "shard" else 1):
            parts.append(f"{part}{size}")
    return "".join(parts) + ("sp" if layout.sequence_parallel else "")


def sizes_text(tp: int, pp: int, dp: int | str, cp: int = 1, times: str = "x") -> str:
    """Return the sizes that multiply to the number of ranks, ``tp 2 x pp 4 x dp 8``; cp where it is above 1."""
    parts = [f"tp {tp}", f"pp {pp}", *([f"cp {cp}"] if cp > 1 else []), f"dp {dp}"]
    return f" {times} ".join(parts)
