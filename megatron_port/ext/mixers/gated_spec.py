"""Spec of attention whose result is gated before its output projection (Qwen3-Next). Plain Python, without torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from megatron_port.core.layers.spec import Groups
from megatron_port.core.model.ops import Op
from megatron_port.core.model.spec import GroupedAttentionSpec


@dataclass(frozen=True, kw_only=True)
class GatedAttentionSpec(GroupedAttentionSpec):
    """Attention whose mixed values are multiplied by the sigmoid of gates, one for each of their elements.

    The fused projection has a gate behind each query, as if there were twice as many query heads.
    """

    module: ClassVar[str] = "megatron_port.ext.mixers.gated_attention:GatedAttention"

    def ops(self, source: str) -> tuple[Op, ...]:
        heads, scores = self._two_ops("packed", "gated heads", "scores")
        return (
            Op(kind="column", run="attention.qkv", site="qkv", reads=(source,), writes=("packed",), part=self.qkv),
            heads,
            Op(kind="gates", run="attention.gates", site="qkv", reads=("packed",), writes=("gates",),
               features=self.mixed_features, keeps=("gates",)),
            replace(scores, writes=("attended",)),
            Op(kind="gate", run="attention.gated", site="core", reads=("attended", "gates"), writes=("mixed",),
               features=self.mixed_features, keeps=("attended", "gates")),
        )


def gated_attention(plain: GroupedAttentionSpec) -> GatedAttentionSpec:
    """Return an attention with gates."""
    groups = plain.groups
    groups = Groups(2 * groups.heads, groups.groups, groups.head_size)
    qkv = replace(plain.qkv, outputs=groups.rows_held(1), groups=groups, row_runs=groups.row_runs)
    return GatedAttentionSpec(**{**vars(plain), "qkv": qkv})
