"""LFM2: layers of gated short convolutions and of attention, one MLP in all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from megatron_port.core.config.model import ATTENTION, RecurrentConfig
from megatron_port.core.config.schema import ModelConfig
from megatron_port.ext.families.family import Family, Fields, Names, common_sizes, rope_scaling
from megatron_port.ext.families.settings import mixers

_MIXERS = {"conv": "short_conv", "full_attention": ATTENTION}


def read(f: Fields) -> dict[str, Any]:
    """Fields of a model."""
    layers, hidden = f.get("num_hidden_layers", 32), f.get("hidden_size", 2560)
    heads, kinds = f.get("num_attention_heads", 32), read_mixers(f, layers)
    recurrent = RecurrentConfig(kernel=f.get("conv_L_cache", 3), convolution_bias=f.get("conv_bias", False))
    if heads < 1 or hidden % heads:
        raise f.fault(f"hidden_size {hidden} does not divide by num_attention_heads {heads}: channels of convolutions "
                      "are grouped as heads")
    return mixers(kinds) | {
        "num_layers": layers, "hidden_size": hidden, "num_attention_heads": heads,
        "num_query_groups": f.get("num_key_value_heads", 8), "head_dim": f.get("head_dim", 0),
        "ffn_hidden_size": read_width(f), "vocab_size": f.get("vocab_size", 65536),
        "seq_length": f.get("max_position_embeddings", 128000), "normalization": "rmsnorm",
        "norm_epsilon": f.get("norm_eps", 1e-5), "qk_norm": True, "activation": "swiglu", "add_bias": False,
        "tie_embeddings": f.get("tie_word_embeddings", True, "tie_embedding"),
        "init_std": f.get("initializer_range", 0.02), **f.rope("rope_theta", 1.0, 1000000.0),
        "recurrent": recurrent if "short_conv" in kinds else RecurrentConfig(),
    }


def read_mixers(f: Fields, layers: int) -> list[str]:
    """Return the mixers of the layers that ``layer_types`` names; without it, attention is in those of
    ``full_attn_idxs``, or in all."""
    indices = f.or_none("full_attn_idxs", list(range(max(layers, 0))), None)
    f.asked.add("layer_types")
    kinds = f.values.get("layer_types")
    by_index = None if indices is None else ["full_attention" if i in indices else "conv" for i in range(layers)]
    if kinds is None:
        kinds = by_index or ["full_attention"] * layers
    if not isinstance(kinds, list) or len(kinds) != layers or any(kind not in _MIXERS for kind in kinds):
        raise f.fault(f"layer_types is {kinds!r:.80}; expected {' or '.join(_MIXERS)} for {layers} layers")
    if f.values.get("full_attn_idxs") is not None and kinds != by_index:
        f.notes.append(f"{f.where}: full_attn_idxs {indices!r:.80} is not what layer_types says; layer_types is read, "
                       "as in transformers")
    return [_MIXERS[kind] for kind in kinds]


def read_width(f: Fields) -> int:
    """Return the width of the MLP: as ``intermediate_size`` says, or two thirds of that, times a factor, rounded up."""
    width, adjusted = f.get("intermediate_size", 12288, "block_ff_dim"), f.get("block_auto_adjust_ff_dim", True)
    factor, multiple = f.get("block_ffn_dim_multiplier", 1.0), f.get("block_multiple_of", 256)
    if not adjusted:
        return int(width)
    if multiple < 1:
        raise f.fault(f"block_multiple_of is {multiple}; expected at least 1")
    return int(-(-int(factor * int(2 * width / 3)) // multiple) * multiple)


def write(model: ModelConfig) -> dict[str, Any]:
    """Fields of a config.json."""
    names = {ours: theirs for theirs, ours in _MIXERS.items()}
    sizes = {name: value for name, value in common_sizes(model).items() if name != "attention_dropout"}
    return sizes | rope_scaling(model) | {
        "num_key_value_heads": model.kv_heads, "head_dim": model.head_size, "block_auto_adjust_ff_dim": False,
        "norm_eps": model.norm_epsilon, "rope_theta": model.rope_theta,
        "layer_types": [names.get(model.mixer_of(layer), "") for layer in range(model.num_layers)],
        "conv_L_cache": model.recurrent.kernel, "conv_bias": model.recurrent.convolution_bias,
    }


# LFM2's names. A unit of ours has as many channels as a head; their projection has B of all channels, then C, then x.

def packed(kind: str) -> Callable[[ModelConfig], Iterator[tuple[str, int, int]]]:
    """Return the rows of the projection's weight or bias (``kind``)."""
    def rows(model: ModelConfig) -> Iterator[tuple[str, int, int]]:
        units = model.recurrent.heads or model.num_attention_heads
        each = model.hidden_size // units
        for unit in range(units):
            for part in range(3):
                yield f"conv.in_proj.{kind}", part * model.hidden_size + unit * each, each

    return rows


NAMES = Names(
    prefix="model.", layer="layers.{}.", head="lm_head.weight",
    outside={"embedding.word": "embed_tokens", "final_norm": "embedding_norm"},
    inside={
        "norm1": "operator_norm", "norm2": "ffn_norm",
        "attention.qkv": tuple(f"self_attn.{part}_proj" for part in "qkv"), "attention.output": "self_attn.out_proj",
        "attention.query_norm": "self_attn.q_layernorm", "attention.key_norm": "self_attn.k_layernorm",
        "mlp.up": ("feed_forward.w1", "feed_forward.w3"), "mlp.down": "feed_forward.w2",
    },
    mixers={"short_conv": {"attention.output": "conv.out_proj", "attention.convolution": "conv.conv"}},
    rows={
        **{f"attention.packed.{kind}": packed(kind) for kind in ("weight", "bias")},
        "attention.convolution.weight": lambda model: [("conv.conv.weight", 0, model.hidden_size)],
    },
    convolutions=("conv.conv.weight",),
)


FAMILY = Family(name="lfm2", architecture="Lfm2ForCausalLM", read=read, write=write, names=NAMES)
