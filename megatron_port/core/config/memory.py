"""The memory part of a run file: what a rank keeps, and where. Changes no number."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron_port.core.config.ranges import Count, NonNegative


@dataclass(frozen=True, kw_only=True)
class ActivationsConfig:
    """Tensors of its forward pass that a layer keeps for its backward pass (docs/activations.md)."""

    policy: Literal["none", "selective", "full", "plan", "profile"] = "none"
    """none (keep everything) | selective (recompute the attention core) | full (recompute each layer from its input) |
    plan (for each stage, free the missing memory in the least time: recompute, swap to the host, or partition over
    tensor-parallel ranks; needs a cluster with [hardware]) | profile (like plan, from measurements of the first
    steps, which recompute everything)"""
    budget: NonNegative = 0.0
    """plan, profile: GiB of one device for activations and the working memory of a layer; 0: what the rest leaves of
    cluster.memory_gb."""
    measure: Count = 3
    """profile: steps that an attempt measures."""
    layers: tuple[str, ...] = ()
    """plan: sites that each layer does not keep, joined by +, one entry per layer: SITE (recompute), SITE:swap or
    SITE:partition; empty: the planner finds them when the run starts, and they are written to its folder."""

    @property
    def recompute(self) -> Literal["none", "selective", "full"]:
        """Policy of recompute that all layers share."""
        return "none" if self.policy == "plan" or self.policy == "profile" else self.policy

    @property
    def choices(self) -> tuple[tuple[str, ...], ...]:
        """Sites that each layer does not keep (``layers`` taken apart) under policy plan; empty under another, or as
        long as nothing is found."""
        return tuple(tuple(filter(None, sites.split("+"))) for sites in self.layers) if self.policy == "plan" else ()
