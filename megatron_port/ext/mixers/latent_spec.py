"""Specs of attention by way of latents (multi-head latent attention, arXiv 2405.04434). Plain Python."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from megatron_port.core.config.schema import ModelConfig
from megatron_port.core.layers.spec import LinearSpec, NormSpec, ParameterSpec
from megatron_port.core.model.ops import Op
from megatron_port.core.model.spec import AttentionSpec


@dataclass(frozen=True, kw_only=True)
class LatentSpec:
    """Queries, keys and values by way of latents (multi-head latent attention, arXiv 2405.04434).

    ``query_down`` and ``query_norm``: None where queries come from the input. ``kv_down`` makes the latent of keys and
    values, and behind it the part of the keys that is rotated and that all heads share; ``kv_up`` makes each head's
    other part of the key, and its value, from the normed latent.
    """

    query_down: LinearSpec | None
    query_norm: NormSpec | None
    query_up: LinearSpec
    kv_down: LinearSpec
    kv_norm: NormSpec
    kv_up: LinearSpec
    rotary_size: int
    """Elements of a head that are rotated."""
    value_size: int
    """Elements of a value."""

    @property
    def linears(self) -> tuple[LinearSpec, ...]:
        """In the order of the forward pass."""
        return *(() if self.query_down is None else (self.query_down,)), self.query_up, self.kv_down, self.kv_up

    @property
    def norms(self) -> tuple[NormSpec, ...]:
        """Norms of the latents."""
        return (self.kv_norm,) if self.query_norm is None else (self.query_norm, self.kv_norm)

    @property
    def parameters(self) -> tuple[ParameterSpec, ...]:
        """In the order of the modules."""
        products = tuple(p for part in self.linears for p in part.parameters)
        return (*products, *(p for norm in self.norms for p in norm.parameters))


@dataclass(frozen=True, kw_only=True)
class LatentAttentionSpec(AttentionSpec):
    """Attention whose queries, keys and values come from latents."""

    module: ClassVar[str] = "megatron_port.ext.mixers.latent_attention:LatentAttention"
    latent: LatentSpec

    @property
    def projections(self) -> tuple[LinearSpec, ...]:
        return self.latent.linears

    @property
    def parameters(self) -> tuple[ParameterSpec, ...]:
        return (*self._own_parameters, *self.latent.parameters, *self.output.parameters)

    @property
    def value_size(self) -> int:
        return self.latent.value_size

    @property
    def up_projections(self) -> tuple[LinearSpec, ...]:
        return self.latent.query_up, self.latent.kv_up

    @property
    def latent_norms(self) -> tuple[NormSpec, ...]:
        return self.latent.norms

    def ops(self, source: str) -> tuple[Op, ...]:
        return self._two_ops(source, "latent heads", "padded scores")


def latent_attention(model: ModelConfig, shared: Mapping[str, Any]) -> LatentAttentionSpec:
    """Return the attention of a layer. ``shared``: the fields of every attention's spec."""
    return LatentAttentionSpec(latent=_latent(model), **shared)


def _latent(model: ModelConfig) -> LatentSpec:
    heads, hidden, rotated = model.num_attention_heads, model.hidden_size, model.qk_rope_head_dim

    def linear(name: str, inputs: int, outputs: int, parallel: Literal["column", "none"]) -> LinearSpec:
        return LinearSpec(
            name=f"attention.{name}", inputs=inputs, outputs=outputs, parallel=parallel, bias=False,
            std=model.matrix_std,
        )

    def norm(name: str, size: int) -> NormSpec:
        return NormSpec(
            name=f"attention.{name}", size=size, kind="rmsnorm", bias=False, epsilon=model.latent_norm_epsilon
        )

    low = model.q_lora_rank
    return LatentSpec(
        query_down=linear("query_down", hidden, low, "none") if low else None,
        query_norm=norm("query_norm", low) if low else None,
        query_up=linear("query_up" if low else "query", low or hidden, heads * model.head_size, "column"),
        kv_down=linear("kv_down", hidden, model.kv_lora_rank + rotated, "none"),
        kv_norm=norm("kv_norm", model.kv_lora_rank),
        kv_up=linear(
            "kv_up", model.kv_lora_rank, heads * (model.head_size - rotated + model.value_size), "column"
        ),
        rotary_size=rotated, value_size=model.value_size,
    )
