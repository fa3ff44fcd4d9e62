"""Section ``[quantisation]``: weights that compute as if they had few bits while they are trained."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from megatron_port.core.config.conflicts import Conflict, Table, native_only
from megatron_port.core.config.ranges import Size

if TYPE_CHECKING:
    from megatron_port.core.config.schema import RunConfig


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


def _groups(config: RunConfig) -> list[str]:
    q, m, tp = config.quantisation, config.model, config.layout.tensor_parallel_size
    sizes = {
        "attention.qkv and mlp.up, model.hidden_size": (m.hidden_size, 1),
        "attention.output, heads × model.head_dim": (m.num_attention_heads * m.head_size, tp),
        "mlp.down, model.ffn_hidden_size": (m.ffn_size, tp),
        **{f"model.{name}": (getattr(m, name), 1) for name in ("qkv_rank", "output_rank", "up_rank", "down_rank")},
    }
    out = []
    for what, (size, ranks) in sizes.items():
        if size % ranks == 0 and size // ranks % q.group_size:  # what tp does not divide is the layout's problem
            each = f" / tensor_parallel_size {ranks} = {size // ranks} on a rank" if ranks > 1 else ""
            out.append(
                f"quantisation.group_size {q.group_size} does not divide the inputs of {what} {size}{each}: a group "
                "would be cut, or left short; use a divisor"
            )
    return out


CONFLICTS = (
    Table(asked="a [quantisation] section", sized=True,
          on=lambda c: not c.quantisation.enabled and c.quantisation != NO_QUANTISATION,
          rows=(Conflict("quantisation.weights", "which rounds nothing",
                         'set weights = "int8", "int4" or "binary", or leave the section out', refused=("none",)),)),
    Table(on=lambda c: c.quantisation.enabled, asked='quantisation.weights "{c.quantisation.weights}"', sized=True,
          rows=(
        native_only(),
        Conflict("precision.fp8", "which rounds the same weights otherwise", 'use fp8 = "none"', allowed=("none",)),
        Conflict("model.moe.num_experts", "products of experts have no few bits yet", "use dense layers"),
        Conflict("model.kv_lora_rank", "latent attention's products have no few bits yet", "use another attention"),
        Conflict("fine_tuning.method", "whose merged weights have other values", "leave one of the two out",
                 allowed=("none",)),
    ), more=(_groups,)),
)
