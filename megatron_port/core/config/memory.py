"""The memory part of a run file: what a rank keeps, and where. Changes no number."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from megatron_port.core.config.conflicts import Rule, Table
from megatron_port.core.config.ranges import Count, NonNegative

if TYPE_CHECKING:
    from megatron_port.core.config.schema import RunConfig


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


def _described(config: RunConfig) -> bool:
    """Return whether the cluster says what a device is and holds."""
    return config.cluster.memory_gb > 0 and bool(config.hardware.device or config.hardware.matmul_tflops)


def _plan(config: RunConfig) -> list[str]:
    a, layers = config.activations, config.model.num_layers
    if a.policy != "plan" and (a.layers or (a.budget and a.policy != "profile")):
        return [f'activations.budget and activations.layers are for policy "plan", and it is "{a.policy}"']
    if a.policy == "profile" and not a.budget and not _described(config):
        return ['activations.policy "profile" needs to know how much fits; set activations.budget, or extend one of '
                "configs/clusters (cluster.memory_gb and [hardware])"]
    if a.layers and len(a.layers) != layers:
        return [f"activations.layers has {len(a.layers)} entries, and the model has {layers} layers; give one for each "
                "(empty: nothing is recomputed), or leave it [] for the planner to fill in"]
    if a.policy == "plan" and not a.layers and not _described(config):
        return ['activations.policy "plan" needs to know the device; extend one of configs/clusters (cluster.memory_gb '
                'and [hardware]), or use "full", "selective" or "none"']
    return []


CONFLICTS = (Table(more=(_plan,), rows=(
    Rule(lambda c: c.engine != "native" and any(":" in sites for sites in c.activations.layers),
         'activations.layers with :swap or :partition need engine = "native"; recompute or keep these sites'),
)),)
