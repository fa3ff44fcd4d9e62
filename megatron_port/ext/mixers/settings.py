"""Settings of mixers other than the package's attention: latent attention, and mixers that plugins register."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_port.core.config.conflicts import Conflict, Rule, Table
from megatron_port.core.config.model import ATTENTION, MixerKind
from megatron_port.core.config.schema import ModelConfig, RunConfig
from megatron_port.core.registry import MIXERS

_OWN = ("q_lora_rank", "qk_rope_head_dim", "v_head_dim")
ATTENTION_SETTINGS = (
    "attention_dropout", "attention_pattern", "attention_scale", "attention_sinks", "attention_softcap",
    "kv_lora_rank", "num_query_groups", "output_rank", "q_lora_rank", "qk_norm", "qk_rope_head_dim", "qkv_bias",
    "qkv_rank", "rope_pattern", "sliding_window", "v_head_dim",
)
"""Settings of a model that only attention reads, unless a mixer says that it does too."""


def _without_latents(config: RunConfig) -> list[str]:
    asked = [f"{name} = {value}" for name in _OWN if (value := getattr(config.model, name))]
    return [f"model.{' and '.join(asked)} needs kv_lora_rank, e.g. 512"] if asked else []


def _key_sizes(config: RunConfig) -> list[str]:
    m = config.model
    if not m.head_dim:
        return ["model.kv_lora_rank needs head_dim, the elements of a query and of a key, e.g. 192"]
    if m.qk_rope_head_dim % 2 or not 0 < m.qk_rope_head_dim <= m.head_dim or m.head_dim % 2:
        return [f"model.qk_rope_head_dim {m.qk_rope_head_dim} must be even, from 2 to head_dim {m.head_dim} (even, "
                "too)"]
    if m.v_head_dim > m.head_dim:
        return [f"model.v_head_dim {m.v_head_dim} is above head_dim {m.head_dim}; use at most {m.head_dim}"]
    return []


LATENTS = (
    Table(on=lambda c: not c.model.kv_lora_rank, sized=True, more=(_without_latents,)),
    Table(
        asked="model.kv_lora_rank {c.model.kv_lora_rank}", on=lambda c: c.model.kv_lora_rank, sized=True,
        link="does not go with", rows=(
            Conflict("model.position_embedding", use='use "rope"', allowed=("rope",)),
            Conflict("model.num_query_groups", use="use 0",
                     when=lambda c: c.model.num_query_groups not in (0, c.model.num_attention_heads)),
            Conflict("model.rotary_percent", use="use 1.0", allowed=(1.0,)),
            Conflict("model.qk_norm", use="use false"),
            Conflict("model.qkv_bias", use="use false"),
            Conflict("model.add_bias", use="use false"),
            Conflict("model.normalization", use='use "rmsnorm"', allowed=("rmsnorm",)),
            Rule(lambda c: c.precision.fp8 != "none",
                 'precision.fp8 "{c.precision.fp8}" is not built for latent attention; use fp8 = "none"'),
        ), more=(_key_sizes,),
    ),
)


def _unable(config: RunConfig) -> list[str]:
    """Name what a plugin's mixer cannot do."""
    name = config.model.mixer
    known = name != ATTENTION and name in MIXERS.names  # config.checks names an unknown one
    return list(_refused(config, name)) if known else []


def _refused(config: RunConfig, name: str) -> Iterator[str]:
    kind, layout, plain = MIXERS.get(name, MixerKind), config.layout, ModelConfig()
    for setting in ATTENTION_SETTINGS:
        if setting not in kind.settings and getattr(config.model, setting) != getattr(plain, setting):
            yield f"model.{setting} is of attention, and model.mixer {name!r} does not read it; leave it out"
    if layout.context_parallel_size > 1 and not kind.context:
        yield (
            f"model.mixer {name!r} does not divide positions over context-parallel ranks; set "
            "layout.context_parallel_size = 1"
        )
    if config.data.attention_documents == "within" and not kind.documents:
        yield (
            f"model.mixer {name!r} does not stop at the start of a document; set data.attention_documents = \"across\""
        )


OF_PLUGINS = (Table(more=(_unable,)),)
