"""Names of what a layer saves for its backward pass, and what is decided of each. Plain Python, without torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

from megatron_port.errors import ConfigError

Site = Literal["input", "norm1", "qkv", "core", "residual", "norm2", "hidden", "activation", "output"]
"""Names of what a layer's operations leave behind: each its result, where a later operation saves it, and what the
operation itself saves beside its arguments (statistics, masks, scores).

======== ==================================================================== ==================
site     operation                                                            its result is read by
======== ==================================================================== ==================
input    the layer before                                                     norm1
norm1    norm of the input                                                    projection
qkv      projection to queries, keys and values; their norms and rotation     core
core     scores, softmax, product with the values                             output projection
residual output projection, its sum over ranks, bias, dropout, addition       norm2
norm2    norm of the residual stream                                          up projection
hidden   up projection                                                        activation
activation  GeLU or SwiGLU                                                    down projection
output   down projection, its sum over ranks, bias, dropout, addition         the layer after
======== ==================================================================== ==================
"""

SITES: tuple[Site, ...] = get_args(Site)
"""In the order of the forward pass."""
RECOMPUTED: tuple[Site, ...] = ("norm1", "qkv", "core", "residual", "norm2", "hidden", "activation")
"""Sites that can be computed again from the one before."""

Decision = Literal["keep", "recompute"]


@dataclass(frozen=True)
class LayerActivations:
    """Decisions for the sites of one layer; those that are not named are kept."""

    decisions: Mapping[Site, Decision] = field(default_factory=dict)

    @property
    def recomputed(self) -> frozenset[Site]:
        """Sites that are dropped after the forward pass and computed again in the backward pass."""
        return frozenset(site for site, decision in self.decisions.items() if decision == "recompute")


def recomputing(sites: Iterable[str]) -> LayerActivations:
    """Return the decisions of a layer that recomputes ``sites`` and keeps the others.

    Raises:
        ConfigError: one of them is no site that can be recomputed (it is named).
    """
    chosen = set(sites)
    unknown = chosen - set(RECOMPUTED)
    if unknown:
        raise ConfigError(
            f"activations.layers: {min(unknown)!r} is no site that can be recomputed; use {', '.join(RECOMPUTED)}"
        )
    return LayerActivations({site: "recompute" for site in RECOMPUTED if site in chosen})
