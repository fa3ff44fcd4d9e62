"""Which settings of multi-head latent attention fit together."""

from __future__ import annotations

from megatron_port.config.dump import toml_value
from megatron_port.config.schema import RunConfig


def latent_problems(config: RunConfig) -> list[str]:
    """Name the options of latent attention that do not fit together."""
    m = config.model
    if not m.kv_lora_rank:
        asked = [f"{name} = {value}" for name in ("q_lora_rank", "qk_rope_head_dim", "v_head_dim")
                 if (value := getattr(m, name))]
        return [f"model.{' and '.join(asked)} needs kv_lora_rank, e.g. 512"] if asked else []
    out = []
    excluded = {
        "position_embedding": ("rope",), "num_query_groups": (0, m.num_attention_heads), "rotary_percent": (1.0,),
        "qk_norm": (False,), "qkv_bias": (False,), "add_bias": (False,), "normalization": ("rmsnorm",),
    }
    for name, allowed in excluded.items():
        if getattr(m, name) not in allowed:
            out.append(
                f"model.{name} = {toml_value(getattr(m, name))} does not go with kv_lora_rank {m.kv_lora_rank}; use "
                f"{toml_value(allowed[0])}"
            )
    if not m.head_dim:
        out.append("model.kv_lora_rank needs head_dim, the elements of a query and of a key, e.g. 192")
    elif m.qk_rope_head_dim % 2 or not 0 < m.qk_rope_head_dim <= m.head_dim or m.head_dim % 2:
        out.append(
            f"model.qk_rope_head_dim {m.qk_rope_head_dim} must be even, from 2 to head_dim {m.head_dim} (even, too)"
        )
    elif m.v_head_dim > m.head_dim:
        out.append(f"model.v_head_dim {m.v_head_dim} is above head_dim {m.head_dim}; use at most {m.head_dim}")
    if config.precision.fp8 != "none":
        out.append(f'precision.fp8 "{config.precision.fp8}" is not built for latent attention; use fp8 = "none"')
    return out
