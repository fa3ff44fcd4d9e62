"""Section ``[sparsity]``: matrices with elements that stay zero, and what stands against them."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Literal

from megatron_port.core.config.conflicts import Conflict, Rule, Table, native_only
from megatron_port.core.config.ranges import Fraction

if TYPE_CHECKING:
    from megatron_port.core.config.schema import ModelConfig, RunConfig

LINEARS = ("*.attention.*.weight", "*.mlp.up.weight", "*.mlp.up_low.weight", "*.mlp.down.weight",
           "*.mlp.down_low.weight", "*.mlp.experts.*.weight", "*.mlp.shared.*.weight")
"""Patterns of the layers' matrices, the two factors of some (``*_low``) among them, without routers."""
NOT_ELEMENTWISE = ("muon",)
"""Rules whose update of an element with a zero gradient is not zero."""
GROUP = 4
"""Elements of a 2:4 group, of which two stay."""


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

    def has(self, name: str) -> bool:
        """Return whether a parameter is sparse, by its canonical name."""
        return self.enabled and any(fnmatchcase(name, p) for p in LINEARS) and not name.endswith("norm.weight") and (
            not self.targets or any(fnmatchcase(name, p) for p in self.targets))


NO_SPARSITY = SparsityConfig()


def _groups_of_four(config: RunConfig) -> list[str]:
    return [
        f'sparsity.method "2:4": {what} has {size} inputs, which do not divide into groups of {GROUP}; use a '
        f"multiple of {GROUP}, or sparsity.targets without it"
        for what, size in inputs(config.model).items() if size % GROUP
    ] if config.sparsity.method == "2:4" else []


CONFLICTS = (
    Table(asked="a [sparsity] section", on=lambda c: not c.sparsity.enabled and c.sparsity != NO_SPARSITY, sized=True,
          rows=(Conflict("sparsity.method", "which leaves nothing out",
                         'set method = "2:4" or "magnitude", or leave the section out', refused=("none",)),)),
    Table(asked='sparsity.method "{c.sparsity.method}"', on=lambda c: c.sparsity.enabled, sized=True, rows=(
        native_only("whose updates know no masks"),
        Rule(lambda c: c.optimizer.name in NOT_ELEMENTWISE,
             "{asked} with optimizer.name {c.optimizer.name!r}, which moves elements without a gradient; use adamw"),
        Conflict("fine_tuning.method", "which freezes these matrices", "leave one of the two out", allowed=("none",)),
        Conflict("offload.optimizer", "masks are taken from masters in memory", 'use "cpu" or "none"',
                 refused=("nvme",)),
        Conflict("quantisation.weights", "which has no zero", 'use "int8" or "int4"', refused=("binary",)),
    ), more=(_groups_of_four,)),
)



def inputs(model: ModelConfig) -> dict[str, int]:
    """Return the number of inputs of the layers' matrices by what they are called."""
    out = {"attention.qkv (model.hidden_size)": model.hidden_size,
           "attention.output (heads × model.head_dim)": model.num_attention_heads * model.head_size,
           **{f"the second factor of {name} (model.{name}_rank)": rank for name, rank in model.ranks.items()}}
    if not model.moe.enabled or model.moe.first_dense:
        out["mlp.down (model.ffn_hidden_size)"] = model.ffn_size
    if model.moe.enabled:
        out["mlp.experts.down (model.moe.ffn_hidden_size)"] = model.expert_size
    return out
