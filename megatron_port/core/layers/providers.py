"""The implementations that a run uses, one for each op, and the table that says which and why."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatron_port.core.layers import fused
from megatron_port.core.layers.attention import Attention, math_attention
from megatron_port.core.layers.cross_entropy import CrossEntropyOps, torch_cross_entropy
from megatron_port.core.layers.linear import PLAIN, LinearKernels, NarrowProducts


@dataclass(frozen=True)
class ProviderRow:
    """Row of the start-up table."""

    op: str
    provider: str
    why: str


@dataclass(frozen=True)
class Providers:
    """The chosen implementations; ``kernels.choose`` makes them."""

    attention: Attention
    layer_norm: fused.NormOp
    rms_norm: fused.NormOp
    bias_gelu: fused.BiasGelu
    swiglu: fused.SwiGLU
    split_rotary: fused.SplitRotary
    bias_dropout_add: fused.BiasDropoutAdd | None
    """None: in plain torch by ``layers.dropout``, which owns the masks."""
    cross_entropy: CrossEntropyOps
    optimizer: str
    """own (engine native) | torch | deepspeed (CPUAdam on a CPU, FusedAdam on a GPU) | apex"""
    table: tuple[ProviderRow, ...]
    partial_attention: str = ""
    """Part (``registry.PARTS``) for attention over parts of the keys, in fp32, where the provider has it."""
    packed_attention: fused.PackedAttention | None = None
    """Attention over the packed q, k and v of one projection, where the provider has it."""
    split_bias: fused.SplitBias | None = None
    """The split that gives the projection's bias its gradient; None: the linear layer does."""
    bias_dropout_add_norm: fused.BiasDropoutAddNorm | None = None
    """``bias_dropout_add`` with the norm that follows, where one provider has both; None: one after the other."""
    products: LinearKernels = PLAIN
    """Products of linears and of the head in the compute dtype."""
    fp8: NarrowProducts | None = None
    """Products of the layers' linears in 8 bits; None: in the compute dtype."""
    experts: Any = None
    """Router and moving of rows of layers of experts (``experts.experts.ExpertOps``); None: torch's."""
    row_exchange: Any = None
    """Exchange of those rows between ranks (``experts.experts.RowExchange``); None: torch's all-to-all."""
    teacher: Providers | None = None
    """Providers of the model that teaches this one, which may need others; None: the same."""

    def describe(self) -> str:
        """Return the table as text."""
        rows = [("op", "provider", "why"), *((r.op, r.provider, r.why) for r in self.table)]
        width = [max(len(row[i]) for row in rows) for i in (0, 1)]
        return "\n".join(f"{op:<{width[0]}}  {provider:<{width[1]}}  {why}" for op, provider, why in rows)


def torch_providers() -> Providers:
    """Return plain torch for every op, with math attention, for references and proofs."""
    ops = ("norm", "activation", "rotary", "dropout", "softmax", "cross_entropy", "optimizer")
    table = (ProviderRow("attention", "math", "reference"), *(ProviderRow(op, "torch", "reference") for op in ops))
    return Providers(
        attention=math_attention, layer_norm=fused.torch_layer_norm, rms_norm=fused.torch_rms_norm,
        bias_gelu=fused.torch_bias_gelu, swiglu=fused.torch_swiglu, split_rotary=fused.torch_split_rotary,
        bias_dropout_add=None, cross_entropy=torch_cross_entropy, optimizer="torch", table=table,
        partial_attention="partial attention, math",
    )
