"""Section ``[sparsity]``: matrices with elements that stay zero."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron_port.core.config.ranges import Fraction


@dataclass(frozen=True, kw_only=True)
class SparsityConfig:
    """Matrices whose smallest elements are zero from the start of the run and stay so (engine native;
    docs/compression.md)."""

    method: Literal["none", "magnitude", "2:4"] = "none"
    """none | magnitude (the share ``ratio`` of each matrix, wherever) | 2:4 (of each four neighbours along the inputs
    the two smallest: what sparse tensor cores multiply)"""
    ratio: Fraction = 0.5
    """With magnitude: share of zeros."""
    targets: tuple[str, ...] = ()
    """Patterns of the names of the layers' matrices (layers.*.mlp.*); empty: all of them, without routers."""

    @property
    def enabled(self) -> bool:
        """Whether anything is zero."""
        return self.method != "none"


NO_SPARSITY = SparsityConfig()
