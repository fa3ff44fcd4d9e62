"""The memory part of a run file: what a rank keeps, and where. Changes no number."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class ActivationsConfig:
    """What a layer keeps of its forward pass for its backward pass."""

    policy: Literal["none", "selective", "full"] = "none"
    """none (keep everything) | selective (recompute the attention core) | full (recompute each layer from its input)"""
