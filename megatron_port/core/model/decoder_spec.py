"""The spec of the decoder that a configuration describes."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache
from typing import Any

from megatron_port.core.config.model import mixer_kind
from megatron_port.core.config.schema import ModelConfig
from megatron_port.core.errors import ConfigError
from megatron_port.core.model.spec import (
    AttentionSpec,
    EmbeddingSpec,
    FeedForward,
    GroupedAttentionSpec,
    Groups,
    HeadSpec,
    LayerSpec,
    LinearSpec,
    MixerSpec,
    MLPSpec,
    ModelSpec,
    NormSpec,
    ParameterSpec,
    PredictionSpec,
    Rotation,
    Split,
)
from megatron_port.core.registry import PARTS

WORD_EMBEDDING = "embedding.word.weight"
"""Canonical name of the token embedding, and of the head's matrix when the two are tied."""


@lru_cache(maxsize=256)
def model_spec(model: ModelConfig) -> ModelSpec:
    """Return the spec of ``model``: embedding, layers and head. Equal layers share one object."""
    kinds: dict[LayerSpec, LayerSpec] = {}
    layers = tuple(kinds.setdefault(layer, layer) for layer in (_layer(model, i) for i in range(model.num_layers)))
    return ModelSpec(_embedding(model), layers, _head(model), model.shared_layers)


def _embedding(model: ModelConfig) -> EmbeddingSpec:
    position = ParameterSpec(
        name="embedding.position.weight", shape=(model.seq_length, model.hidden_size), init="normal",
        std=model.init_std, decay=True, gradient="tokens",
    )
    return EmbeddingSpec(
        word=_table(WORD_EMBEDDING, model, tied=_shares_table(model)),
        position=position if model.position_embedding == "learned" else None,
    )


def _shares_table(model: ModelConfig) -> bool:
    """Whether the last stage reads the token table: its head, or the modules that predict further tokens."""
    return model.tie_embeddings or model.mtp_layers > 0


def _head(model: ModelConfig) -> HeadSpec:
    tied = model.tie_embeddings
    name = WORD_EMBEDDING if tied else "head.weight"
    bias = ParameterSpec(
        name="head.bias", shape=(model.vocab_size,), init="zeros", decay=False, split=Split(0, vocabulary=True)
    )
    return HeadSpec(
        norm=_norm("final_norm", model), weight=_table(name, model, tied=tied), bias=bias if model.head_bias else None,
        predictions=tuple(_prediction(model, i) for i in range(model.mtp_layers)),
        table=_table(WORD_EMBEDDING, model, tied=True) if model.mtp_layers and not tied else None,
    )


def _prediction(model: ModelConfig, index: int) -> PredictionSpec:
    """Module ``index`` of multi-token prediction. Patterns of layers reach it: its layer is the one after the last."""
    return PredictionSpec(
        name=f"mtp.{index}", embedding_norm=_norm("embedding_norm", model), hidden_norm=_norm("hidden_norm", model),
        projection=LinearSpec(
            name="projection", inputs=2 * model.hidden_size, outputs=model.hidden_size, parallel="none", bias=False,
            std=model.matrix_std,
        ),
        layer=_layer(model, model.num_layers + index), norm=_norm("norm", model),
    )


def _table(name: str, model: ModelConfig, *, tied: bool) -> ParameterSpec:
    return ParameterSpec(
        name=name, shape=(model.vocab_size, model.hidden_size), init="normal", std=model.init_std, decay=True,
        split=Split(0, vocabulary=True), tied=tied,
    )


def _norm(name: str, model: ModelConfig) -> NormSpec:
    """A norm of the residual stream, or of what is added to it."""
    kind = model.normalization
    return NormSpec(
        name=name, size=model.hidden_size, kind=kind, zero_centered=model.norm_zero_centered,
        bias=kind == "layernorm" and (model.add_bias or model.norm_bias),
    )


def _qk_norm(part: str, model: ModelConfig, groups: Groups) -> NormSpec | None:
    """A norm of queries or of keys. Heads are split over tensor-parallel ranks, so each rank has a part of the gradient
    of a weight that serves all heads, and a part of a weight that has an element for each of theirs."""
    if not model.qk_norm:
        return None
    norm = NormSpec(
        name=f"attention.{part}_norm", size=groups.head_size, kind="rmsnorm", bias=False, gradient="heads",
        zero_centered=model.norm_zero_centered,
    )
    if model.qk_norm_over == "head":
        return norm
    heads, split = groups.heads, Split(0)
    if part == "key":
        heads, split = groups.groups, Split(0, kv_heads=groups.groups)
    return replace(norm, size=heads * groups.head_size, gradient="whole", split=split)


def _layer(model: ModelConfig, index: int) -> LayerSpec:
    placement, mlp = model.norms_of(index), model.has_mlp(index)
    before, after = placement != "post", placement != "pre"
    return LayerSpec(
        norm1=_norm("norm1", model) if before else None, mixer=_mixer(model, index),
        post_norm1=_norm("post_norm1", model) if after else None,
        norm2=_norm("norm2", model) if mlp and before and not model.shared_norm else None,
        mlp=_feed_forward(model, index),
        post_norm2=_norm("post_norm2", model) if mlp and after else None, parallel_residual=model.parallel_residual,
    )


def _feed_forward(model: ModelConfig, index: int) -> FeedForward:
    if model.has_mlp(index) and not model.moe.has_experts(index):
        return mlp_spec(model)
    part = "expert layer spec" if model.has_mlp(index) else "no feed-forward block"
    found: FeedForward = PARTS.function(part)(model)
    return found


def residual_std(model: ModelConfig) -> float:
    """Initial deviation of the two projections per layer that write to the residual stream (GPT-2's 1/sqrt(2 L))."""
    return model.matrix_std / math.sqrt(2 * model.num_layers)


def _mixer(model: ModelConfig, index: int) -> MixerSpec:
    kind = mixer_kind(model, index)
    if kind is None:
        return attention_spec(model, index)
    found = kind.spec(model, index)
    if not isinstance(found, MixerSpec):
        raise ConfigError(f"the mixer of layer {index} gives {found!r}, which is no MixerSpec; see CONTRIBUTING.md")
    return found


def attention_spec(model: ModelConfig, index: int) -> AttentionSpec:
    """Return the attention of a layer (from 0)."""
    groups = Groups(model.num_attention_heads, model.kv_heads, model.head_size)
    output = LinearSpec(
        name="attention.output", inputs=groups.heads * model.value_size, outputs=model.hidden_size, parallel="row",
        bias=model.add_bias, std=residual_std(model), rank=model.output_rank,
    )
    shared: dict[str, Any] = {
        "groups": groups, "output": output, "rotation": _rotation(model, index), "window": model.window_of(index),
        "chunk": model.chunk_of(index), "softcap": model.attention_softcap,
        "sinks": _sinks(groups) if model.attention_sinks else None,
    }
    if model.kv_lora_rank:
        found: AttentionSpec = PARTS.function("latent attention")(model, shared)
        return found
    qkv = LinearSpec(
        name="attention.qkv", inputs=model.hidden_size, outputs=groups.rows_held(1), parallel="column",
        bias=model.add_bias or model.qkv_bias, std=model.matrix_std, groups=groups, rank=model.qkv_rank,
        row_runs=groups.row_runs,
    )
    plain: AttentionSpec = GroupedAttentionSpec(
        qkv=qkv, query_norm=_qk_norm("query", model, groups), key_norm=_qk_norm("key", model, groups), **shared
    )
    return PARTS.function("gated attention")(plain) if model.attention_gate else plain


def _rotation(model: ModelConfig, index: int) -> Rotation:
    if not model.rotates(index):
        return "none"
    return "window" if model.window_rope_theta and model.window_of(index) else "usual"


def _sinks(groups: Groups) -> ParameterSpec:
    """Split by query head, whose order among tensor-parallel ranks is that of the fused projection's."""
    return ParameterSpec(name="attention.sinks", shape=(groups.heads,), init="zeros", decay=False, split=Split(0))


def mlp_spec(model: ModelConfig, name: str = "mlp", width: int = 0) -> MLPSpec:
    """Return a block by the name of its parameters. Only the matrices of dense layers may be factored."""
    bias, dense = model.add_bias or model.mlp_bias, name == "mlp"
    width = width or model.ffn_size
    plain = MLPSpec(
        up=LinearSpec(
            name=f"{name}.up", inputs=model.hidden_size, outputs=width, parallel="column", bias=bias,
            std=model.matrix_std, packed=2 if model.gated else 1, rank=model.up_rank if dense else 0,
        ),
        down=LinearSpec(
            name=f"{name}.down", inputs=width, outputs=model.hidden_size, parallel="row", bias=bias,
            std=residual_std(model), rank=model.down_rank if dense else 0,
        ),
        activation=model.activation,
    )
    return PARTS.function("scaled feed-forward block")(plain, model) if model.mlp_multipliers else plain
