"""``config.json`` of Hugging Face's GPT-2, GPT-NeoX and Llama, and our model: both directions, nothing guessed.

What our model cannot compute is refused with the key that asks for it. Read as JSON; transformers is not needed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_port.config.schema import ModelConfig
from megatron_port.errors import CheckpointError
from megatron_port.interop.hf_names import FAMILIES, GPT2, LLAMA, NEOX

CONFIG = "config.json"
_MAX_BYTES = 1 << 24
_ACTIVATIONS = {
    "gelu": "gelu", "gelu_python": "gelu", "gelu_new": "gelu_tanh", "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}
_ARCHITECTURES = {GPT2: "GPT2LMHeadModel", NEOX: "GPTNeoXForCausalLM", LLAMA: "LlamaForCausalLM"}


class _Fields:
    """The keys of a ``config.json`` with transformers' defaults where one is absent or null."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self.values, self.where = values, where

    def get(self, name: str, default: Any, *names: str) -> Any:
        """The first of ``name`` and ``names`` that is there and not null. Its type must be the default's."""
        for key in (name, *names):
            value = self.values.get(key)
            if value is None:
                continue
            number = isinstance(default, float) and isinstance(value, int) and not isinstance(value, bool)
            if type(value) is not type(default) and not number:
                raise self.fault(f"{key} is {value!r:.80}; expected {type(default).__name__}")
            return float(value) if number else value
        return default

    def fault(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self.where}: {what}")

    def refuse(self, name: str, ours: Any, what: str) -> None:
        """The key must be absent or ``ours``."""
        value = self.values.get(name)
        if value is not None and value != ours:
            raise self.fault(f"{name} is {value!r:.80}: {what}; only {ours!r} can be imported")

    def activation(self, value: str) -> str:
        if value not in _ACTIVATIONS:
            raise self.fault(f"activation {value!r:.80} is not one of {', '.join(_ACTIVATIONS)}, which this model has")
        return _ACTIVATIONS[value]


def read_hf_config(folder: Path) -> dict[str, Any]:
    """Return ``config.json`` as a dictionary. Raises CheckpointError."""
    path = folder / CONFIG
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise CheckpointError(f"{path}: {path.stat().st_size} bytes; such a file has at most {_MAX_BYTES}")
        body = json.loads(path.read_bytes())
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}; a Hugging Face folder has a config.json") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not JSON: {error}") from None
    if not isinstance(body, dict):
        raise CheckpointError(f"{path}: not an object")
    return body


def family_of(config: Mapping[str, Any], where: str) -> str:
    """Return ``gpt2``, ``gpt_neox`` or ``llama``. Raises CheckpointError for another ``model_type``."""
    found = config.get("model_type")
    if found not in FAMILIES:
        raise CheckpointError(f"{where}: model_type {found!r:.80}; only {', '.join(FAMILIES)} can be imported")
    return str(found)


def model_from_hf(config: Mapping[str, Any], where: str) -> ModelConfig:
    """The model that a ``config.json`` describes, derived sizes filled in.

    ``seq_length`` is its longest context; under rope a run may train with any.

    Raises:
        CheckpointError: it asks for something that our model does not have.
    """
    family = family_of(config, where)
    fields = _Fields(config, where)
    values = {GPT2: _gpt2, NEOX: _neox, LLAMA: _llama}[family](fields)
    name = config.get("_name_or_path") or family
    try:
        model = ModelConfig(name=Path(str(name)).name or family, **values)
    except TypeError as error:
        raise fields.fault(str(error)) from None
    sizes = ("num_layers", "hidden_size", "num_attention_heads", "vocab_size", "seq_length", "kv_heads", "ffn_size")
    for size in sizes:
        if getattr(model, size) < 1:
            raise fields.fault(f"{size} is {getattr(model, size)}")
    if model.num_attention_heads % model.kv_heads or (
        not model.head_dim and model.hidden_size % model.num_attention_heads
    ):
        raise fields.fault(
            f"hidden size {model.hidden_size}, {model.num_attention_heads} heads and {model.kv_heads} key/value heads "
            "do not divide"
        )
    return ModelConfig(**{
        **vars(model), "num_query_groups": model.kv_heads, "head_dim": model.head_size,
        "ffn_hidden_size": model.ffn_size,
    })


def _gpt2(f: _Fields) -> dict[str, Any]:
    f.refuse("scale_attn_weights", True, "attention scores that are not divided by the root of the head size")
    f.refuse("scale_attn_by_inverse_layer_idx", False, "attention scores divided by the layer's number")
    f.refuse("add_cross_attention", False, "cross-attention")
    dropout = f.get("resid_pdrop", 0.1)
    hidden = f.get("n_embd", 768, "hidden_size")
    return {
        "num_layers": f.get("n_layer", 12, "num_hidden_layers"), "hidden_size": hidden,
        "num_attention_heads": f.get("n_head", 12, "num_attention_heads"),
        "ffn_hidden_size": f.get("n_inner", 4 * hidden), "vocab_size": f.get("vocab_size", 50257),
        "seq_length": f.get("n_positions", 1024, "max_position_embeddings"), "position_embedding": "learned",
        "normalization": "layernorm", "norm_epsilon": f.get("layer_norm_epsilon", 1e-5),
        "activation": f.activation(f.get("activation_function", "gelu_new")), "add_bias": True,
        "tie_embeddings": f.get("tie_word_embeddings", True), "hidden_dropout": dropout,
        "attention_dropout": f.get("attn_pdrop", 0.1), "init_std": f.get("initializer_range", 0.02),
    }


def _neox(f: _Fields) -> dict[str, Any]:
    f.refuse("attention_bias", True, "attention without biases and the rest with them")
    hidden = f.get("hidden_size", 6144)
    return {
        "num_layers": f.get("num_hidden_layers", 44), "hidden_size": hidden,
        "num_attention_heads": f.get("num_attention_heads", 64),
        "ffn_hidden_size": f.get("intermediate_size", 24576), "vocab_size": f.get("vocab_size", 50432),
        "seq_length": f.get("max_position_embeddings", 2048), "normalization": "layernorm",
        "norm_epsilon": f.get("layer_norm_eps", 1e-5), "activation": f.activation(f.get("hidden_act", "gelu")),
        "add_bias": True, "tie_embeddings": f.get("tie_word_embeddings", False),
        "parallel_residual": f.get("use_parallel_residual", True), "hidden_dropout": f.get("hidden_dropout", 0.0),
        "attention_dropout": f.get("attention_dropout", 0.0), "init_std": f.get("initializer_range", 0.02),
        **_rope(f, "rotary_emb_base", f.get("rotary_pct", 0.25)),
    }


def _llama(f: _Fields) -> dict[str, Any]:
    if f.get("hidden_act", "silu") != "silu":
        raise f.fault(f"hidden_act {f.values['hidden_act']!r:.80}: only silu (SwiGLU) can be imported")
    f.refuse("pretraining_tp", 1, "products in slices")
    f.refuse("partial_rotary_factor", 1.0, "rotation of a part of each head")
    biases = f.get("attention_bias", False), f.get("mlp_bias", False)
    if biases[0] != biases[1]:
        raise f.fault(f"attention_bias {biases[0]}, mlp_bias {biases[1]}: this model has biases everywhere or nowhere")
    heads = f.get("num_attention_heads", 32)
    hidden = f.get("hidden_size", 4096)
    return {
        "num_layers": f.get("num_hidden_layers", 32), "hidden_size": hidden, "num_attention_heads": heads,
        "num_query_groups": f.get("num_key_value_heads", heads), "head_dim": f.get("head_dim", 0),
        "ffn_hidden_size": f.get("intermediate_size", 11008), "vocab_size": f.get("vocab_size", 32000),
        "seq_length": f.get("max_position_embeddings", 2048), "normalization": "rmsnorm",
        "norm_epsilon": f.get("rms_norm_eps", 1e-6), "activation": "swiglu", "add_bias": biases[0],
        "tie_embeddings": f.get("tie_word_embeddings", False), "attention_dropout": f.get("attention_dropout", 0.0),
        "init_std": f.get("initializer_range", 0.02), **_rope(f, "rope_theta", 1.0),
    }


def _rope(f: _Fields, base: str, percent: float) -> dict[str, Any]:
    """From ``rope_parameters`` (transformers 5), or ``rope_scaling`` and the keys beside it (4)."""
    table = f.values.get("rope_parameters") or f.values.get("rope_scaling") or {}
    if not isinstance(table, Mapping):
        raise f.fault(f"rope_parameters is {table!r:.80}")
    rope = _Fields({**f.values, **table}, f"{f.where}, rope_parameters")
    kind = rope.get("rope_type", "default", "type")
    if kind not in ("default", "linear", "llama3"):
        raise rope.fault(f"rope_type {kind!r:.80}; only default, linear and llama3 can be imported")
    out = {
        "position_embedding": "rope", "rope_theta": rope.get("rope_theta", 10000.0, base),
        "rotary_percent": rope.get("partial_rotary_factor", percent),
    }
    if kind == "default":
        return out
    out |= {"rope_scaling": kind, "rope_factor": rope.get("factor", 1.0)}
    if kind == "llama3":
        length = rope.get("original_max_position_embeddings", 0)
        if length < 1:
            raise rope.fault("rope_type llama3 without original_max_position_embeddings")
        out |= {
            "rope_original_length": length, "rope_low_freq_factor": rope.get("low_freq_factor", 1.0),
            "rope_high_freq_factor": rope.get("high_freq_factor", 4.0),
        }
    return out


def family_for(model: ModelConfig) -> str:
    """The architecture that computes what this model does.

    Raises:
        CheckpointError: there is none; says what each of them would need.
    """
    gelu = {"activation": (model.activation in ("gelu", "gelu_tanh"), "gelu or gelu_tanh")}
    layernorm = {"normalization": (model.normalization == "layernorm", "layernorm")}
    heads = {
        "num_query_groups": (model.kv_heads == model.num_attention_heads, "one for each head"),
        "head_dim": (model.head_size * model.num_attention_heads == model.hidden_size, "hidden_size / heads"),
    }
    rope = {"position_embedding": (model.position_embedding == "rope", "rope")}
    sequential = {"parallel_residual": (not model.parallel_residual, "false")}
    bias = {"add_bias": (model.add_bias, "true")}
    needs = {
        GPT2: {"position_embedding": (model.position_embedding == "learned", "learned"), **layernorm, **gelu, **bias,
               **sequential, **heads},
        NEOX: {**rope, **layernorm, **gelu, **bias, **heads},
        LLAMA: {**rope, "normalization": (model.normalization == "rmsnorm", "rmsnorm"),
                "activation": (model.activation == "swiglu", "swiglu"), **sequential,
                "rotary_percent": (model.rotary_percent == 1.0, "1.0")},
    }
    lacking = {f: [f"{k} = {v}" for k, (ok, v) in need.items() if not ok] for f, need in needs.items()}
    for family, missing in lacking.items():
        if not missing:
            return family
    raise CheckpointError(
        "no Hugging Face architecture known here computes what this model does: "
        + "; ".join(f"{family} needs {', '.join(missing)}" for family, missing in lacking.items())
    )


def hf_config(model: ModelConfig, *, dtype: str, eos: int | None) -> dict[str, Any]:
    """A ``config.json`` for :func:`family_for`'s architecture. ``dtype``: e.g. ``float32``. ``eos``: end of text."""
    family = family_for(model)
    activation = "gelu_new" if model.activation == "gelu_tanh" else "gelu"
    out: dict[str, Any] = {
        "architectures": [_ARCHITECTURES[family]], "model_type": family, "vocab_size": model.vocab_size,
        "tie_word_embeddings": model.tie_embeddings, "initializer_range": model.init_std, "torch_dtype": dtype,
        "bos_token_id": eos, "eos_token_id": eos, "use_cache": True,
    }
    if family == GPT2:
        return out | {
            "n_layer": model.num_layers, "n_embd": model.hidden_size, "n_head": model.num_attention_heads,
            "n_inner": model.ffn_size, "n_positions": model.seq_length, "n_ctx": model.seq_length,
            "layer_norm_epsilon": model.norm_epsilon, "activation_function": activation,
            "resid_pdrop": model.hidden_dropout, "embd_pdrop": model.hidden_dropout,
            "attn_pdrop": model.attention_dropout,
        }
    out |= {
        "num_hidden_layers": model.num_layers, "hidden_size": model.hidden_size,
        "num_attention_heads": model.num_attention_heads, "intermediate_size": model.ffn_size,
        "max_position_embeddings": model.seq_length, "attention_dropout": model.attention_dropout,
    }
    scaling = _scaling(model)
    if family == NEOX:
        return out | scaling | {
            "layer_norm_eps": model.norm_epsilon, "hidden_act": activation, "rotary_pct": model.rotary_percent,
            "rotary_emb_base": model.rope_theta, "use_parallel_residual": model.parallel_residual,
            "attention_bias": True, "hidden_dropout": model.hidden_dropout,
        }
    return out | scaling | {
        "rope_theta": model.rope_theta, "rms_norm_eps": model.norm_epsilon, "hidden_act": "silu",
        "num_key_value_heads": model.kv_heads, "head_dim": model.head_size, "attention_bias": model.add_bias,
        "mlp_bias": model.add_bias,
    }


def _scaling(model: ModelConfig) -> dict[str, Any]:
    """Return ``rope_scaling`` as versions 4 and 5 both read it."""
    if model.rope_scaling == "none":
        return {"rope_scaling": None}
    table: dict[str, Any] = {"rope_type": model.rope_scaling, "factor": model.rope_factor}
    if model.rope_scaling == "llama3":
        table |= {
            "original_max_position_embeddings": model.rope_original_length,
            "low_freq_factor": model.rope_low_freq_factor, "high_freq_factor": model.rope_high_freq_factor,
        }
    return {"rope_scaling": table}
