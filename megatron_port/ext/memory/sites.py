"""What is decided of each thing that a layer saves for its backward pass. Plain Python, without torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

from megatron_port.core.config.features import ActivationsConfig
from megatron_port.core.errors import ConfigError
from megatron_port.core.model.ops import Site

SITES: tuple[Site, ...] = get_args(Site)
"""In the order of the forward pass."""
RECOMPUTED: tuple[Site, ...] = ("norm1", "qkv", "core", "residual", "norm2", "hidden", "activation")
"""Sites that can be computed again from the one before."""
REPLICATED: tuple[Site, ...] = ("input", "norm1", "residual", "norm2", "output")
"""Sites that all tensor-parallel ranks hold alike without sequence parallelism, and so can be partitioned."""

Decision = Literal["keep", "recompute", "swap", "partition"]
"""swap: in host memory from forward to backward pass; partition: 1/tp on each tensor-parallel rank meanwhile."""


@dataclass(frozen=True)
class LayerActivations:
    """Decisions for the sites of one layer; those that are not named are kept."""

    decisions: Mapping[Site, Decision] = field(default_factory=dict)

    def of(self, decision: Decision) -> frozenset[Site]:
        """Return the sites of which this is decided."""
        return frozenset(site for site, decided in self.decisions.items() if decided == decision)

    def __bool__(self) -> bool:
        return any(decided != "keep" for decided in self.decisions.values())


def choice(site: Site, decision: Decision) -> str:
    """Return a decision as activations.layers states it: ``norm1`` (recompute), ``hidden:swap``."""
    return site if decision == "recompute" else f"{site}:{decision}"


def decided(choices: Iterable[str]) -> LayerActivations:
    """Return the decisions of a layer from those of activations.layers; sites that are not named are kept.

    Raises:
        ConfigError: one of them is unknown, not possible for its site, or a second one for it (it is named).
    """
    out: dict[Site, Decision] = {}
    for stated in choices:
        name, _, how = stated.partition(":")
        possible: dict[str, tuple[Site, ...]] = {"": RECOMPUTED, "swap": SITES, "partition": REPLICATED}
        if how not in possible:
            raise ConfigError(f"activations.layers: {stated!r} decides {how!r}; use SITE, SITE:swap or SITE:partition")
        site = next((known for known in possible[how] if known == name), None)
        if site is None:
            what = {"": "recomputed", "swap": "swapped", "partition": "partitioned over the tensor-parallel ranks"}[how]
            raise ConfigError(
                f"activations.layers: {name!r} is no site that can be {what}; use {', '.join(possible[how])}"
            )
        if site in out:
            raise ConfigError(f"activations.layers: {name!r} is decided twice in one layer")
        out[site] = "recompute" if not how else "swap" if how == "swap" else "partition"
    return LayerActivations({site: out[site] for site in SITES if site in out})


def layer_choices(activations: ActivationsConfig, num_layers: int) -> tuple[tuple[str, ...], ...]:
    """Return the choices of each layer with which a run starts; empty: all layers keep all, or share a policy.

    Policy profile recomputes every site until it has measured.
    """
    return (RECOMPUTED,) * num_layers if activations.policy == "profile" else activations.choices
