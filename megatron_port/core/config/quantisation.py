"""Section ``[quantisation]``: weights that compute as if they had few bits while they are trained."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron_port.core.config.ranges import Size


@dataclass(frozen=True, kw_only=True)
class QuantisationConfig:
    """Training that knows of the few bits which the layers' linears will have: products see the nearest value that
    such bits can say, and gradients pass straight through (engine native; docs/compression.md)."""

    weights: Literal["none", "int8", "int4", "binary"] = "none"
    """none | int8 | int4 (a scale per group, so that no value is beyond the range) | binary (plus or minus the mean
    size of the group; Rastegari et al., arXiv 1603.05279)"""
    group_size: Size = 32
    """Neighbours along the inputs that share a scale; a divisor of each linear's inputs on a rank."""

    @property
    def enabled(self) -> bool:
        """Whether products see other weights than the optimizer."""
        return self.weights != "none"


NO_QUANTISATION = QuantisationConfig()
